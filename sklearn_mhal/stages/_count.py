"""Counting heads: spectral gaps propose, held-out error decides.

Without noise the right number drops the held-out error to rounding and one head fewer does not.
A fit with too many heads is exact too, but then some head can be dropped or merged, which costs
little: so numbers are tried in growing strides, the cheapest candidate of each, and only if none
is exact does every number get all its candidates. With noise it is the smallest number whose
held-out error is within one standard error of the best.
"""

from __future__ import annotations

import numpy as np

from .._examples import Examples
from .._progress import SILENT, Progress
from .._sums import regress_all
from ._fewer import PATIENCE, fewest, no_worse, probes, refitted
from ._result import timed
from .heads import EXACT, Candidate, Heads, Search, with_idle
from .span import Span

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
        winner = no_worse(search, search.best(n_heads))
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
        found = search.best(count, probes(search, count), n_candidates=1)
        if found.exact:
            return fewest(search, found)
        if search.stopped or (
            best is not None and found.held_out_error > best.held_out_error - best.standard_error
        ):
            break
        best = found
    assert best is not None
    return _count_carefully(search, best.n_heads, most)


def _count_carefully(search: Search, start: int, most: int) -> Candidate:
    """Return the winner when every number, up and down from a start, gets all its candidates."""
    best = found = search.best(start, probes(search, start))
    idle = 0
    for count in range(start + 1, most + 1):
        if found.exact or idle >= PATIENCE or search.stopped:
            break
        found = search.best(count, probes(search, count))
        idle = 0 if found.held_out_error < best.held_out_error - best.standard_error else idle + 1
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    if found.exact:
        return fewest(search, found)
    for count in range(start - 1, 0, -1):
        if search.stopped:
            break
        found = search.best(count, probes(search, count))
        if found.exact:
            return fewest(search, found)
        if found.held_out_error > best.held_out_error + best.standard_error:
            break
        best = min(best, found, key=lambda candidate: candidate.held_out_error)
    return _within_one_standard_error(search)


def _within_one_standard_error(search: Search) -> Candidate:
    """Fit the tried numbers of heads again on the same, many samples; return the smallest good one."""
    fitted = [refitted(search, search.best(count)) for count in search.errors_by_count]
    best = min(fitted, key=lambda candidate: candidate.held_out_error)
    enough = best.held_out_error + best.standard_error
    return next(candidate for candidate in fitted if candidate.held_out_error <= enough)


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
