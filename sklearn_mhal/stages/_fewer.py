"""Doing with fewer heads: those that others can replace, or that fit nothing but noise.

Without noise a head can go if the fit stays exact without it. With noise the training samples tell, by the
squared residual plus a price for every unknown.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular

from .heads import Candidate, Search

# Starts for a number of heads that is only a guess.
_PROBES = 2
# After this many further heads without improvement no more are tried.
PATIENCE = 2
# A head whose removal leaves a larger relative squared error, the others' attention held, is
# needed; under it the solver tries to do without. Near-equal heads hold on to each other until
# the solver has converged, so the threshold is generous; trying in vain costs one short start.
_NEEDED = 0.03
# The same where the number is given and so only heads that do nothing are in the way.
_IDLE = 1e-3
# Samples, in multiples of the information limit, to tell heads apart on: without noise and with.
_EXACT_ROWS = 6
_NOISY_ROWS = 32
# What an unknown has to be worth, in noise variances, beyond its degree of freedom.
_PRICE = 4.0
# So few numbers in the attention matrices make a start cheap, and tokens so narrow that another
# number of heads may fit as well.
_NARROW = 100
# A head's label power under hard attention, as a multiple of the number of tokens times the label
# power: above it heads cancel.
_CANCELLING = 10.0


def probes(search: Search, n_heads: int) -> int:
    """Return the random starts that a number of heads gets that is only a guess."""
    return search.n_starts if _is_narrow(search, n_heads) else _PROBES


def _is_narrow(search: Search, n_heads: int) -> bool:
    return search.train.query_width * search.train.n_features * n_heads <= _NARROW


def fewest(search: Search, found: Candidate) -> Candidate:
    """Return an exact fit with the fewest heads that the search can find."""
    found = _drop_idle_heads(search, found)
    while found.n_heads > 1 and _another_may_fit(search, found):
        fewer = search.best(found.n_heads - 1, probes(search, found.n_heads - 1))
        if not fewer.exact:
            break
        found = _drop_idle_heads(search, fewer)
    return found


def _another_may_fit(search: Search, found: Candidate) -> bool:
    """Return whether an exact fit, no head of which can go, still makes one ask for fewer heads."""
    projection, _ = search.projections(found)
    power = np.square(projection.reshape(found.n_heads, -1)).sum(axis=1) / projection.shape[1]
    return bool(_is_narrow(search, found.n_heads) or power.max() > _CANCELLING * search.train.n_tokens)


def no_worse(search: Search, found: Candidate) -> Candidate:
    """Return a given number of heads, or fewer where the last ones fit nothing but noise.

    Without noise, fewer that fit as well: superfluous heads leave equations that are singular.
    """
    if found.exact:
        return _drop_idle_heads(search, found, needed=_IDLE)
    best = current = refitted(search, found)
    price = least = _price(search, current, found.n_heads)
    worse = 0
    while current.n_heads > 1 and worse < PATIENCE and not search.stopped:
        head, _ = _least_needed(search, current)
        current = _without(search, current, head, _NOISY_ROWS, found.n_heads)
        search.offer(current)
        price = _price(search, current, found.n_heads)
        worse = 0 if price <= least else worse + 1
        best, least = (current, price) if price <= least else (best, least)
    return best


def _price(search: Search, candidate: Candidate, most: int) -> float:
    """Return the noise that a candidate leaves in the training samples, plus a price for its unknowns.

    The deviance ``n log(variance)``, as in the criteria of Akaike and Schwarz. A superfluous head lowers
    the squared residual by 1 to 4 noise variances for each of its unknowns (measured), since it is the
    best of many, and raises it elsewhere by as much. Held-out samples, a tenth or fewer, do not see that.
    """
    problem = search.problem(search.rows_for(most, _NOISY_ROWS))
    n_equations, n_unknowns = problem.labels.size, search.train.n_unknowns(candidate.n_heads)
    loss = max(problem.evaluate(candidate.attention).regression.loss, 1e-300)
    variance = loss / max(n_equations - n_unknowns, 1)
    return float(n_equations * np.log(variance) + _PRICE * n_unknowns)


def refitted(search: Search, found: Candidate) -> Candidate:
    """Return a candidate fitted to many samples, if that is better."""
    if not search.polish:
        return found
    again = search.improve(found.source, found.attention, _NOISY_ROWS)
    search.offer(again)
    return min(found, again, key=lambda candidate: candidate.held_out_error)


def _without(
    search: Search, found: Candidate, head: int, multiple: int, n_heads: int | None = None
) -> Candidate:
    """Return a candidate with one head fewer, fitted to a multiple of what `n_heads` need."""
    width = search.train.n_features
    columns = np.delete(np.arange(found.attention.shape[1]), slice(head * width, (head + 1) * width))
    fewer = found.attention[:, columns]
    if search.polish:
        return search.improve(found.source, fewer, multiple, n_heads=n_heads)
    return search.judge(found.source, search.problem(search.rows_for(found.n_heads, multiple)), fewer)


def _drop_idle_heads(search: Search, found: Candidate, *, needed: float = _NEEDED) -> Candidate:
    """Drop heads that others can replace, as long as the fit stays exact."""
    while found.n_heads > 1:
        head, error = _least_needed(search, found)
        if error > needed:
            return found
        fewer = _without(search, found, head, _EXACT_ROWS)
        if not fewer.exact:
            return found
        search.offer(fewer)
        found = fewer
    return found


def _least_needed(search: Search, found: Candidate) -> tuple[int, float]:
    """Return the head whose removal hurts least and the relative error it leaves.

    With the other heads' attention held and the projections fitted again, so that a head equal
    to another counts as not needed. Removing the columns of head i from a least-squares problem
    of Gram matrix G raises the squared residual by ``tr(W_i^T [(G^-1)_ii]^-1 W_i)``.
    """
    problem = search.problem(search.rows_for(found.n_heads, _EXACT_ROWS))
    regression = problem.evaluate(found.attention).regression
    n_columns, width = found.attention.shape[1], search.train.n_features
    half = solve_triangular(
        regression.factor, np.eye(len(regression.factor))[:, :n_columns], lower=True, check_finite=False
    )
    errors = []
    for head in range(found.n_heads):
        columns = slice(head * width, (head + 1) * width)
        projection = regression.projection[columns]
        inverse = half[:, columns].T @ half[:, columns]
        left = float(np.vdot(projection, np.linalg.lstsq(inverse, projection)[0]))
        errors.append((regression.loss + left) / problem.label_power)
    return int(np.argmin(errors)), float(min(errors))
