"""Counting heads: spectral gaps propose, held-out error decides.

Without noise the right number drops the held-out error to rounding and one head fewer does not.
A fit with too many heads is exact too, but then some head can be dropped or merged, which costs
little: so numbers are tried in growing strides, the cheapest candidate of each, and only if none
is exact does every number get all its candidates. With noise it is the smallest number whose
held-out error is within one standard error of the best.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular

from .._examples import Examples
from .._progress import SILENT, Progress
from .._sums import regress_all
from ._result import timed
from .heads import EXACT, Candidate, Heads, Search, with_idle
from .span import Span

# Starts for a number of heads that is only a guess.
_PROBES = 2
# After this many further heads without improvement no more are tried.
_PATIENCE = 2
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
# Enough to tell errors apart to a few per cent, and they are all held in memory.
_MOST_HELD_OUT = 4096
# Fewer say nothing under noise; where samples are scarce it is a fiftieth of them that is spared.
_LEAST_HELD_OUT = 8


@timed
def find_heads(
    examples: Examples,
    span: Span,
    *,
    n_heads: int | None = None,
    max_heads: int = 8,
    n_starts: int = 20,
    n_points: int = 64,
    max_tuples: int = 2500,
    polish: bool = True,
    validation_fraction: float = 0.1,
    max_iter: int = 100,
    ridge: float = 0.0,
    attention_ridge: float = 0.0,
    generator: np.random.Generator,
    progress: Progress = SILENT,
) -> Heads:
    """Find the heads, and their number if it is not given.

    Parameters
    ----------
    examples : Examples
    span : Span
        Stage 4's result.
    n_heads : int or None
        None counts them.
    max_heads : int
        Largest number tried when counting.
    n_starts : int
        Random starts for a number of heads before the best is taken for what it is.
    n_points : int
        Size of the net in a frame.
    max_tuples : int
        Tuples of net points to regress on, at most, for one frame.
    polish : bool
        Whether candidates are improved outside their frame; False is the paper's algorithm.
    validation_fraction : float in (0, 1)
        Share of the samples held out, at most 4096 of them. Fewer where samples are scarce: three times the
        information limit is left for training if possible.
    max_iter : int
        Solver steps of one start.
    ridge, attention_ridge : float
        Penalties, a mean over rows.
    generator : numpy.random.Generator
    progress : Progress
        Told of every candidate.

    Returns
    -------
    Heads
    """
    affordable = _affordable(examples, max_heads)
    limit = examples.information_limit(n_heads or 1)
    least, most = (
        np.clip(examples.n_samples // 50, 1, _LEAST_HELD_OUT),
        validation_fraction * examples.n_samples,
    )
    n_test = int(np.clip(examples.n_samples - 3 * limit, least, max(least, most)))
    n_test = min(n_test, _MOST_HELD_OUT, examples.n_samples - 1) if examples.n_samples > 1 else 0
    # The last lots are held out, so that the first ones serve the search and the polish alike.
    n_train = examples.n_samples - n_test
    test = examples.between(n_train, examples.n_samples) if n_test else examples
    named = tuple(frame.source for frame in span.frames)
    search = Search(
        train=examples.first(n_train),
        test=test,
        span=span,
        sources=named if span.exclusive else (*named, "random"),
        polish=polish,
        n_starts=n_starts,
        n_points=n_points,
        max_tuples=max_tuples,
        max_iter=max_iter,
        ridge=ridge,
        attention_ridge=attention_ridge,
        generator=generator,
        progress=progress,
    )
    if examples.n_tokens == 1:
        winner = search.best(1)
    elif n_heads is not None:
        winner = _no_worse(search, search.best(n_heads))
    else:
        winner = _count(search, min(span.n_heads, affordable) if span.n_heads else None, affordable)
    return _report(search, winner, examples, n_heads or winner.n_heads)


def _affordable(examples: Examples, max_heads: int) -> int:
    """Return the largest number of heads whose unknowns the equations outnumber, at least one."""
    equations = examples.n_samples * examples.equations_per_sample
    counts = [count for count in range(1, max_heads + 1) if examples.n_unknowns(count) < equations]
    return max(counts, default=1)


def _ladder(proposal: int | None, most: int) -> list[int]:
    """Return numbers of heads to look at first: a proposal and the next, then ever larger strides."""
    start = 1 if proposal is None else proposal
    strides = [start, start + 1] + [(start + 1) * 2**power for power in range(1, most.bit_length() + 1)]
    return sorted({min(count, most) for count in strides})


def _count(search: Search, proposal: int | None, most: int) -> Candidate:
    """Return the winner over the numbers of heads."""
    best: Candidate | None = None
    for count in _ladder(proposal, most):
        found = search.best(count, _probes(search, count), n_candidates=1)
        if found.exact:
            return _fewest(search, found)
        if search.stopped or (
            best is not None and found.held_out_error > best.held_out_error - best.standard_error
        ):
            break
        best = found
    assert best is not None
    return _count_carefully(search, best.n_heads, most)


def _count_carefully(search: Search, start: int, most: int) -> Candidate:
    """Return the winner when every number, up and down from a start, gets all its candidates."""
    best = found = search.best(start, _probes(search, start))
    idle = 0
    for count in range(start + 1, most + 1):
        if found.exact or idle >= _PATIENCE or search.stopped:
            break
        found = search.best(count, _probes(search, count))
        idle = 0 if found.held_out_error < best.held_out_error - best.standard_error else idle + 1
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    if found.exact:
        return _fewest(search, found)
    for count in range(start - 1, 0, -1):
        if search.stopped:
            break
        found = search.best(count, _probes(search, count))
        if found.exact:
            return _fewest(search, found)
        if found.held_out_error > best.held_out_error + best.standard_error:
            break
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    return _within_one_standard_error(search)


def _probes(search: Search, n_heads: int) -> int:
    """Return the random starts that a number of heads gets that is only a guess."""
    return search.n_starts if _is_narrow(search, n_heads) else _PROBES


def _is_narrow(search: Search, n_heads: int) -> bool:
    return search.train.query_width * search.train.n_features * n_heads <= _NARROW


def _fewest(search: Search, found: Candidate) -> Candidate:
    """Return an exact fit with the fewest heads that the search can find."""
    found = _drop_idle_heads(search, found)
    while found.n_heads > 1 and _another_may_fit(search, found):
        fewer = search.best(found.n_heads - 1, _probes(search, found.n_heads - 1))
        if not fewer.exact:
            break
        found = _drop_idle_heads(search, fewer)
    return found


def _another_may_fit(search: Search, found: Candidate) -> bool:
    """Return whether an exact fit, no head of which can go, still makes one ask for fewer heads."""
    projection, _ = search.projections(found)
    power = np.square(projection.reshape(found.n_heads, -1)).sum(axis=1) / projection.shape[1]
    return bool(_is_narrow(search, found.n_heads) or power.max() > _CANCELLING * search.train.n_tokens)


def _no_worse(search: Search, found: Candidate) -> Candidate:
    """Return a given number of heads, or fewer where the last ones fit nothing but noise.

    Without noise, fewer that fit as well: superfluous heads leave equations that are singular.
    """
    if found.exact:
        return _drop_idle_heads(search, found, needed=_IDLE)
    best = current = _refitted(search, found)
    price = least = _price(search, current, found.n_heads)
    worse = 0
    while current.n_heads > 1 and worse < _PATIENCE and not search.stopped:
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


def _refitted(search: Search, found: Candidate) -> Candidate:
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


def _within_one_standard_error(search: Search) -> Candidate:
    """Fit the tried numbers of heads again on the same, many samples; return the smallest good one."""
    fitted = [_refitted(search, search.best(count)) for count in search.errors_by_count]
    best = min(fitted, key=lambda candidate: candidate.held_out_error)
    enough = best.held_out_error + best.standard_error
    return next(candidate for candidate in fitted if candidate.held_out_error <= enough)


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


def _report(search: Search, winner: Candidate, examples: Examples, n_heads: int) -> Heads:
    if search.polish:
        projection, intercept = search.projections(winner)
    else:
        # Nothing comes after this, so all samples have their say.
        ridge = search.ridge * examples.n_samples * examples.labels.shape[1]
        projection, intercept = regress_all(examples, winner.attention, ridge=ridge, n_jobs=None)
    n_idle = n_heads - winner.n_heads
    attention, projection = with_idle(winner.attention, projection, n_idle * examples.n_features)
    counts = search.errors_by_count
    tried = ", ".join(f"{count}: {error:.1e}" for count, error in counts.items())
    return Heads(
        layer=examples.units.layer(attention, projection, intercept),
        attention=attention,
        projection=projection,
        intercept=intercept,
        n_heads=n_heads,
        n_idle=n_idle,
        source=winner.source,
        held_out_error=winner.held_out_error,
        errors_by_count=counts,
        n_candidates=search.n_candidates,
        n_tuples=search.n_tuples,
        n_samples=search.train.n_samples + search.test.n_samples,
        message=(
            f"{winner.n_heads} head{'s' if winner.n_heads > 1 else ''} from {winner.source}; "
            f"held-out error by number of heads: {tried}"
            + (f"; {n_idle} more would not help and stay zero" if n_idle else "")
            + ("" if winner.held_out_error < EXACT else "; noise or misfit remains")
        ),
    )
