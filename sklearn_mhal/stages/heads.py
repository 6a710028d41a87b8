"""Stage 5: the heads and their projections, chosen by held-out rows.

Section 6 of the paper searches a net of the hull, regresses the projections for every tuple of
points and lets held-out rows choose. Here candidates come from every source (the frames of
stage 4 and seeded random starts), are improved on a few samples, and meet on the same held-out
rows. A candidate whose held-out error is zero up to rounding cannot be beaten, so the search
ends with it; cheap sources are asked first.

Counting heads is the same search over the number of heads (:mod:`._count`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from .._examples import Examples
from .._forward import Array
from .._problem import Problem
from .._progress import SILENT, Progress
from .._solver import solve
from ..layer import AttentionLayer
from ._net import best_tuples, held_out_errors, net_points, refine_in_frame
from ._result import StageResult, logger
from ._softness import soft_samples
from .span import Frame, Span

# Held-out error (relative, squared) under which a candidate fits without noise.
EXACT = 1e-7
# The solver stops here: Newton's method doubles the digits from now on, and stage 6 takes them.
_BASIN = 1e-8
# And here if held-out samples still see what is left.
_DEEPER = 1e-12
_START_SCALE = 0.3
# Samples of a first start, in units of the information limit; doubled for every further one.
_FIRST_ROWS = 6
_MOST_ROWS = 24
_LEAST_SAMPLES = 32
# Samples to choose the softest from, in multiples of those chosen.
_POOL = 8
# Penalties of an eased start, a mean over rows, and solver steps for each.
_EASING = (0.3, 0.1, 0.01)
_EASING_STEPS = 40
# Two starts that end this close (relative) have found the same optimum.
_SAME = 1e-3
# Growth of the samples of a start that they do not determine, and its end in multiples of the limit.
_GROWTH, _MOST_GROWN = 4, 100


@dataclass(frozen=True, eq=False)
class Candidate:
    """One fitted set of heads."""

    source: str
    n_heads: int
    attention: Array
    """(q, m * d), stacked, internal units."""
    held_out_error: float
    """Mean squared residual on held-out samples relative to the label power."""
    standard_error: float
    """Of that mean."""

    @property
    def exact(self) -> bool:
        """Whether no noise or misfit is left."""
        return self.held_out_error < EXACT


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads(StageResult):
    """The heads before the polish."""

    layer: AttentionLayer
    """In the units of the data."""
    attention: Array
    """Stacked, internal units: where the polish starts."""
    projection: Array
    intercept: Array
    """Of `layer`, internal units."""
    n_heads: int
    n_idle: int
    """How many of them, the last, are zero: more were asked for than help on held-out samples."""
    source: str
    """Which source won: "sculpt", "oracle", "moments" or "random"."""
    held_out_error: float
    """Relative squared error on held-out samples."""
    errors_by_count: dict[int, float]
    """Best held-out error for every number of heads tried."""
    n_candidates: int
    n_tuples: int
    """Candidates fitted, and tuples of net points regressed on."""

    @property
    def exact(self) -> bool:
        """Whether held-out samples see no noise or misfit."""
        return self.held_out_error < EXACT


@dataclass(eq=False)
class Search:
    """The search over candidates: what it looks in, what it has found.

    Parameters are those of :func:`~sklearn_mhal.stages.heads.find_heads`.
    """

    train: Examples
    test: Examples
    span: Span
    sources: tuple[str, ...]
    polish: bool
    n_starts: int
    n_points: int
    max_tuples: int
    max_iter: int
    ridge: float
    attention_ridge: float
    generator: np.random.Generator
    progress: Progress = SILENT
    n_candidates: int = 0
    n_tuples: int = 0
    stopped: bool = False
    """Whether a callback has asked to stop."""
    _best: dict[int, Candidate] = field(default_factory=dict)
    _streams: dict[int, Generator[Candidate]] = field(default_factory=dict)
    _problems: dict[int, Problem] = field(default_factory=dict)
    _test_problem: Problem | None = None

    def problem(self, n_samples: int) -> Problem:
        """Return the problem on the first training samples, made once."""
        n_samples = min(n_samples, self.train.n_samples)
        if n_samples not in self._problems:
            self._problems[n_samples] = self.train.first(n_samples).problem(
                ridge=self.ridge, attention_ridge=self.attention_ridge
            )
        return self._problems[n_samples]

    def rows_for(self, n_heads: int, multiple: int) -> int:
        """Return a number of samples: a multiple of the information limit, at least a handful."""
        return max(multiple * self.train.information_limit(n_heads), _LEAST_SAMPLES)

    def judge(self, source: str, problem: Problem, attention: Array) -> Candidate:
        """Return the attention as a candidate with its held-out error."""
        if self._test_problem is None:
            self._test_problem = self.test.problem()
        errors = held_out_errors(problem, self._test_problem, attention)
        self.n_candidates += 1
        spread = float(errors.std()) / np.sqrt(max(len(errors) - 1, 1))
        return Candidate(
            source=source,
            n_heads=attention.shape[1] // self.train.n_features,
            attention=attention,
            held_out_error=float(errors.mean()),
            standard_error=spread,
        )

    def best(
        self, n_heads: int, n_starts: int | None = None, *, n_candidates: int | None = None
    ) -> Candidate:
        """Return the best candidate with that many heads, searching for it if needed.

        With `n_candidates` only so many more are fitted, the cheapest first; a later call goes on.
        """
        if n_heads not in self._streams:
            self._streams[n_heads] = self._candidates(n_heads, n_starts or self.n_starts)
        stream = self._streams[n_heads]
        for candidate in islice(stream, n_candidates):
            before = self._best.get(n_heads)
            repeated = before is not None and abs(
                candidate.held_out_error - before.held_out_error
            ) <= _SAME * min(candidate.held_out_error, before.held_out_error)
            self.offer(candidate)
            best = self._best[n_heads]
            self.stopped = self.progress.step("candidate", partial(self.layer, best)) or self.stopped
            logger.debug(
                "heads: %d from %s, held-out error %.2e", n_heads, candidate.source, candidate.held_out_error
            )
            if best.exact or repeated or self.stopped:
                stream.close()
                break
        return self._best[n_heads]

    def layer(self, candidate: Candidate) -> AttentionLayer:
        """Return a candidate as a layer in the units of the data."""
        return self.train.units.layer(candidate.attention, *self.projections(candidate))

    def projections(self, candidate: Candidate) -> tuple[Array, Array]:
        """Return a candidate's projections and intercept, internal units, fitted to a few samples."""
        problem = self.problem(self.rows_for(candidate.n_heads, _FIRST_ROWS))
        found = problem.evaluate(candidate.attention).regression
        return found.projection, found.intercept

    def offer(self, candidate: Candidate) -> None:
        """Enter a candidate found elsewhere."""
        known = self._best.get(candidate.n_heads)
        if known is None or candidate.held_out_error < known.held_out_error:
            self._best[candidate.n_heads] = candidate

    @property
    def errors_by_count(self) -> dict[int, float]:
        """Best held-out error for every number of heads tried."""
        return {count: self._best[count].held_out_error for count in sorted(self._best)}

    def _candidates(self, n_heads: int, n_starts: int) -> Generator[Candidate]:
        """Yield candidates, the cheap sources first."""
        if self.train.n_tokens == 1:
            zeros = np.zeros((self.train.query_width, n_heads * self.train.n_features))
            yield self.judge("random", self.problem(self.train.n_samples), zeros)
            return
        frames = [f for f in (frame.for_heads(n_heads) for frame in self.span.frames) if f is not None]
        frames = [frame for frame in frames if frame.source in self.sources]
        # Without polish the frames are the algorithm, and chance only stands in where there is none.
        random_allowed = not frames or (self.polish and "random" in self.sources)
        multiple = _FIRST_ROWS
        if random_allowed:
            scarce = self.train.n_samples < self.rows_for(n_heads, multiple)
            yield self.improve("random", self._random_start(n_heads), multiple, eased=scarce)
            n_starts -= 1
        for frame in frames:
            yield from self._from_frame(frame, n_heads, multiple)
        for _ in range(n_starts if random_allowed else 0):
            multiple = min(2 * multiple, _MOST_ROWS)
            yield self.improve("random", self._random_start(n_heads), multiple, eased=True)

    def _random_start(self, n_heads: int) -> Array:
        shape = (self.train.query_width, n_heads * self.train.n_features)
        return self.generator.standard_normal(shape) * (_START_SCALE / self.train.n_features)

    def _from_frame(self, frame: Frame, n_heads: int, multiple: int) -> Generator[Candidate]:
        problem = self.problem(self.rows_for(n_heads, multiple))
        points = net_points(frame, n_points=self.n_points, generator=self.generator)
        tuples, n_tried = best_tuples(
            problem,
            frame,
            points,
            n_heads=n_heads,
            n_best=2,
            max_tuples=self.max_tuples,
            generator=self.generator,
        )
        self.n_tuples += n_tried
        refined = [refine_in_frame(problem, frame, coordinates) for coordinates in tuples]
        for attention, _ in sorted(refined, key=lambda pair: pair[1])[:1]:
            candidate = self.judge(frame.source, problem, attention)
            yield candidate
            if self.polish:
                yield self.improve(frame.source, attention, multiple)

    def improve(
        self, source: str, start: Array, multiple: int, *, eased: bool = False, n_heads: int | None = None
    ) -> Candidate:
        """Run the solver from a start on a few samples: a multiple of what `n_heads`, or its own, need.

        An eased start first follows the minima of ever weaker penalties. Equal penalties on
        attention and projections favour few strong heads over many that cancel, and so lead past
        most local minima: at twice the information limit four of five starts succeed instead of
        one in thirty.
        """
        n_heads = n_heads or start.shape[1] // self.train.n_features
        problem = self.problem(self.rows_for(n_heads, multiple))
        for penalty in _EASING if eased else ():
            softened = problem.penalised(max(penalty, self.ridge), max(penalty, self.attention_ridge))
            start = solve(softened, start, tol=1e-2, max_iter=_EASING_STEPS, give_up_above=_BASIN).attention
        settings: dict[str, Any] = {
            "tol": 1e-6,
            "max_iter": self.max_iter,
            "give_up_above": EXACT,
            "stop_below": _BASIN,
        }
        solution = solve(problem, start, **settings)
        candidate = self.judge(source, problem, solution.attention)
        if solution.error < EXACT <= candidate.held_out_error:
            # Few samples determine some directions so weakly that the others ask for more digits.
            solution = solve(problem, solution.attention, **settings | {"stop_below": _DEEPER})
            again = self.judge(source, problem, solution.attention)
            candidate = min(candidate, again, key=lambda item: item.held_out_error)
        n_chosen, most = problem.rows.n_samples, self.rows_for(n_heads, _MOST_GROWN)
        while solution.error < EXACT <= candidate.held_out_error and n_chosen < min(
            self.train.n_samples, most
        ):
            # What explains its samples and not the others needs more samples, not more heads; of those
            # with the softest patterns, which under hard attention are few.
            n_chosen = _GROWTH * n_chosen
            softest = soft_samples(self.train.first(_POOL * n_chosen), solution.attention, n_chosen)
            problem = softest.problem(ridge=self.ridge, attention_ridge=self.attention_ridge)
            solution = solve(problem, solution.attention, **settings)
            again = self.judge(source, problem, solution.attention)
            candidate = min(candidate, again, key=lambda item: item.held_out_error)
        return candidate


def with_idle(attention: Array, projection: Array, n_columns: int) -> tuple[Array, Array]:
    """Return stacked attention and projections with zeros for that many more columns and rows."""
    return np.pad(attention, ((0, 0), (0, n_columns))), np.pad(projection, ((0, n_columns), (0, 0)))
