"""The paper's search: an epsilon-net in a frame, m-tuples of its points, a regression for each.

Each net point is one candidate head; its pooled tokens are computed once. A tuple of m points is
scored by the linear regression of the labels on its m blocks, which needs only blocks of one
Gram matrix. All tuples are tried where they are few, else tuples are improved one head at a
time from several random ones. The best tuples are refined by Levenberg-Marquardt in the frame's
m r coordinates.
"""

from __future__ import annotations

import itertools
from math import comb

import numpy as np

from .._forward import Array
from .._problem import Problem, bounded, regress
from .span import Frame

# Coordinates are in units of the logits' standard deviation; beyond the largest a pattern is
# hard and looks the same.
_RADII = (0.75, 2.0, 5.0, 12.0)
_EXCHANGE_STARTS = 3
_EXCHANGE_SWEEPS = 3
_REFINE_STEPS = 12
# Derivatives whose squares are below this have vanished with all softness.
_SATURATED = 1e-30


def net_points(frame: Frame, *, n_points: int, generator: np.random.Generator) -> Array:
    """Return net coordinates, shape (about n_points, r): the origin and shells around it.

    In one dimension the shells are pairs of opposite points; in more they hold random
    directions, whose covering radius falls as ``n_points^(-1/r)``: the exponential price that
    the paper states.
    """
    r = len(frame.directions)
    if r == 0:
        return np.zeros((1, 0))
    if r == 1:
        reach = np.geomspace(_RADII[0] / 2, _RADII[-1], max(n_points // 2, 1))
        return np.concatenate([-reach[::-1], [0.0], reach])[:, None]
    per_shell = max(n_points // len(_RADII), 1)
    shells = []
    for radius in _RADII:
        directions = generator.standard_normal((per_shell, r))
        shells.append(radius * directions / np.linalg.norm(directions, axis=1, keepdims=True))
    return np.concatenate([np.zeros((1, r)), *shells])


class _Tuples:
    """Regressions for tuples of net points from one Gram matrix."""

    def __init__(self, problem: Problem, frame: Frame, points: Array) -> None:
        rows = problem.rows
        self.width = d = rows.n_features
        vectors = frame.origin + points @ frame.directions
        stacked = vectors.reshape(len(points), -1, d).transpose(1, 0, 2).reshape(-1, len(points) * d)
        design = rows.pooled(rows.patterns(stacked))
        labels = problem.labels
        if problem.fit_intercept:
            ones = np.ones(len(design)) if rows.row_scale is None else rows.row_scale
            ones = ones / np.linalg.norm(ones)
            design = design - np.outer(ones, ones @ design)
            labels = labels - np.outer(ones, ones @ labels)
        self.gram = design.T @ design
        self.right = design.T @ labels
        self.ridge = 1e-6 * max(float(np.trace(self.gram)) / len(self.gram), 1e-300)

    def explained(self, tuples: Array) -> Array:
        """Return the label power that each tuple (t, m) explains."""
        columns = (tuples[:, :, None] * self.width + np.arange(self.width)).reshape(len(tuples), -1)
        gram = self.gram[columns[:, :, None], columns[:, None, :]]
        gram[:, np.arange(columns.shape[1]), np.arange(columns.shape[1])] += self.ridge
        right = self.right[columns]
        return np.asarray(np.einsum("tco,tco->t", np.linalg.solve(gram, right), right))


def best_tuples(
    problem: Problem,
    frame: Frame,
    points: Array,
    *,
    n_heads: int,
    n_best: int,
    max_tuples: int,
    generator: np.random.Generator,
) -> tuple[Array, int]:
    """Return the coordinates of the best tuples, (n_best, m, r), and how many were tried."""
    scorer = _Tuples(problem, frame, points)
    n_points = len(points)
    if n_heads <= n_points and comb(n_points, n_heads) <= max_tuples:
        tuples = np.array(list(itertools.combinations(range(n_points), n_heads)))
        scores = scorer.explained(tuples)
        return points[tuples[np.argsort(-scores)[:n_best]]], len(tuples)
    found: dict[tuple[int, ...], float] = {}
    n_tried = 0
    for _ in range(_EXCHANGE_STARTS):
        current = generator.choice(n_points, size=n_heads, replace=n_points < n_heads)
        best = -np.inf
        for _ in range(_EXCHANGE_SWEEPS):
            before = best
            for head in range(n_heads):
                trials = np.tile(current, (n_points, 1))
                trials[:, head] = np.arange(n_points)
                scores = scorer.explained(trials)
                n_tried += n_points
                winner = int(np.argmax(scores))
                if scores[winner] > best:
                    best, current = float(scores[winner]), trials[winner]
            if not best > before or n_tried >= max_tuples:
                break
        found[tuple(sorted(int(index) for index in current))] = best
        if n_tried >= max_tuples:
            break
    ranked = sorted(found, key=lambda indices: -found[indices])[:n_best]
    return points[np.array(ranked)], n_tried


def refine_in_frame(problem: Problem, frame: Frame, coordinates: Array) -> tuple[Array, float]:
    """Run Levenberg-Marquardt on the frame coordinates (m, r), projections eliminated.

    The Jacobian has only m r columns and is formed. Returns the stacked attention and the
    relative squared residual.
    """
    d = problem.rows.n_features
    n_heads, r = coordinates.shape

    def stacked(position: Array) -> Array:
        vectors = frame.origin + position @ frame.directions
        return vectors.reshape(n_heads, -1, d).transpose(1, 0, 2).reshape(-1, n_heads * d)

    state = problem.evaluate(stacked(coordinates))
    damping = 1e-2
    for _ in range(_REFINE_STEPS if r else 0):
        values = problem.rows.values(state.regression.projection)
        basis = state.regression.orthonormal()
        columns = np.empty((n_heads * r, state.regression.residual.size))
        for index in range(n_heads * r):
            step = np.zeros((n_heads, r))
            step.flat[index] = 1.0
            direction = stacked(step) - stacked(np.zeros((n_heads, r)))
            change = problem.rows.forward_product(direction, state.patterns, values)
            columns[index] = (change - basis @ (basis.T @ change)).ravel()
        normal = columns @ columns.T
        gradient = columns @ state.regression.residual.ravel()
        scale = float(np.trace(normal)) / len(normal)
        if not scale > _SATURATED:
            break
        for _ in range(6):
            step = np.linalg.solve(normal + damping * scale * np.eye(len(normal)), gradient)
            trial_at = bounded(coordinates + step.reshape(n_heads, r))
            trial = problem.evaluate(stacked(trial_at))
            if trial.error < state.error:
                break
            damping *= 4.0
        else:
            break
        slow = trial.error > 0.99 * state.error
        coordinates, state, damping = trial_at, trial, max(damping / 8.0, 1e-10)
        if slow:
            break
    return state.attention, state.error


def held_out_errors(train: Problem, test: Problem, attention: Array) -> Array:
    """Return each test sample's squared residual with projections fitted on `train`.

    Relative to the mean label power of a sample, so the mean is a relative squared error. All
    labels have unit power by construction of the units; the power of the test samples alone
    would be zero where a single one is held out.
    """
    fitted = regress(
        train.rows.pooled(train.rows.patterns(attention)),
        train.labels,
        row_scale=train.rows.row_scale,
        fit_intercept=train.fit_intercept,
        ridge=train.ridge,
    )
    design = test.rows.pooled(test.rows.patterns(attention))
    residual = test.labels - design @ fitted.projection
    if test.fit_intercept:
        scale = test.rows.row_scale
        residual -= fitted.intercept if scale is None else np.outer(scale, fitted.intercept)
    squares = np.einsum("ro,ro->r", residual, residual)
    per_sample = squares.reshape(test.rows.n_samples, -1).sum(axis=1)
    return np.asarray(per_sample / (test.rows.rows_per_sample * residual.shape[1]))
