"""Counting heads: spectral gaps propose, held-out error decides.

Without noise the right number drops the held-out error to rounding and one head fewer does not;
a fit with too many heads is exact too, but then some head can be dropped or merged. With noise
it is the smallest number whose held-out error is within one standard error of the best.
"""

from __future__ import annotations

import numpy as np

from .._examples import Examples
from .._forward import Array
from .._progress import SILENT, Progress
from .._solver import regress
from .._sums import regress_all
from ._result import timed
from .heads import EXACT, Candidate, Heads, Search
from .span import Span

# Starts for a number of heads that is only a guess.
_PROBES = 2
# After this many further heads without improvement no more are tried.
_PATIENCE = 2
# A head whose removal leaves a larger relative squared error, the others' attention held, is
# needed; under it the solver tries to do without. Near-equal heads hold on to each other until
# the solver has converged, so the threshold is generous; trying in vain costs one short start.
_NEEDED = 0.03
_NOISY_ROWS = 32
# Enough to tell errors apart to a few per cent, and they are all held in memory.
_MOST_HELD_OUT = 4096


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
    n_test = int(np.clip(examples.n_samples - 3 * limit, 1, max(1, validation_fraction * examples.n_samples)))
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
        winner = search.best(n_heads)
    else:
        winner = _count(search, min(span.n_heads or 1, affordable), affordable)
    return _report(search, winner, examples)


def _affordable(examples: Examples, max_heads: int) -> int:
    """Return the largest number of heads whose unknowns the equations outnumber, at least one."""
    equations = examples.n_samples * examples.equations_per_sample
    counts = [count for count in range(1, max_heads + 1) if examples.n_unknowns(count) < equations]
    return max(counts, default=1)


def _count(search: Search, proposal: int, most: int) -> Candidate:
    """Return the winner over the numbers of heads."""
    found = search.best(proposal, _PROBES)
    idle, best = 0, found
    for count in range(proposal + 1, most + 1):
        if found.exact or idle >= _PATIENCE:
            break
        found = search.best(count, _PROBES)
        idle = 0 if found.held_out_error < best.held_out_error - best.standard_error else idle + 1
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    if found.exact:
        return _drop_idle_heads(search, found)
    for count in range(proposal - 1, 0, -1):
        found = search.best(count, _PROBES)
        if found.exact:
            return found
        if found.held_out_error > best.held_out_error + best.standard_error:
            break
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    return _within_one_standard_error(search)


def _within_one_standard_error(search: Search) -> Candidate:
    """Fit the tried numbers of heads again on the same, many samples; return the smallest good one."""
    counts = list(search.errors_by_count)
    multiple = _NOISY_ROWS
    fitted: list[Candidate] = []
    for count in counts:
        start = search.best(count)
        candidate = search.improve(start.source, start.attention, multiple)
        fitted.append(min(start, candidate, key=lambda item: item.held_out_error))
        search.offer(candidate)
    best = min(fitted, key=lambda candidate: candidate.held_out_error)
    enough = best.held_out_error + best.standard_error
    return next(candidate for candidate in fitted if candidate.held_out_error <= enough)


def _drop_idle_heads(search: Search, found: Candidate) -> Candidate:
    """Drop heads that others can replace, as long as the fit stays exact."""
    while found.n_heads > 1:
        head, error = _least_needed(search, found)
        if error > _NEEDED:
            return found
        width = search.train.n_features
        columns = np.delete(np.arange(found.attention.shape[1]), slice(head * width, (head + 1) * width))
        fewer = search.improve(found.source, found.attention[:, columns], 6)
        if not fewer.exact:
            return found
        search.offer(fewer)
        found = fewer
    return found


def _least_needed(search: Search, found: Candidate) -> tuple[int, float]:
    """Return the head whose removal hurts least and the relative error it leaves.

    With the other heads' attention held and the projections fitted again, so that a head equal
    to another counts as not needed.
    """
    problem = search.problem(search.rows_for(found.n_heads, 6))
    rows, width = problem.rows, search.train.n_features
    pooled = rows.pooled(rows.patterns(found.attention))
    errors = []
    for head in range(found.n_heads):
        rest: Array = np.delete(pooled, slice(head * width, (head + 1) * width), axis=1)
        left = regress(
            rest,
            problem.labels,
            row_scale=rows.row_scale,
            fit_intercept=problem.fit_intercept,
            ridge=problem.ridge,
        )
        errors.append(left.loss / problem.label_power)
    return int(np.argmin(errors)), float(min(errors))


def _report(search: Search, winner: Candidate, examples: Examples) -> Heads:
    if search.polish:
        projection, intercept = search.projections(winner)
    else:
        # Nothing comes after this, so all samples have their say.
        ridge = search.ridge * examples.n_samples * examples.labels.shape[1]
        projection, intercept = regress_all(examples, winner.attention, ridge=ridge, n_jobs=None)
    counts = search.errors_by_count
    tried = ", ".join(f"{count}: {error:.1e}" for count, error in counts.items())
    return Heads(
        layer=examples.units.layer(winner.attention, projection, intercept),
        attention=winner.attention,
        projection=projection,
        intercept=intercept,
        n_heads=winner.n_heads,
        source=winner.source,
        held_out_error=winner.held_out_error,
        errors_by_count=counts,
        n_candidates=search.n_candidates,
        n_tuples=search.n_tuples,
        n_samples=search.train.n_samples + search.test.n_samples,
        message=(
            f"{winner.n_heads} head{'s' if winner.n_heads > 1 else ''} from {winner.source}; "
            f"held-out error by number of heads: {tried}"
            + ("" if winner.held_out_error < EXACT else "; noise or misfit remains")
        ),
    )
