"""What certified rows say about the attention matrices: equalities and half-spaces.

Both speak of the vector ``vec([Theta; u])`` of a head, length ``D = q d``, in internal units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from .._forward import Array
from .._information import upper
from ._agreement import RowFit, Rows
from ._body import most_half_spaces

# Interior rows count by the inverse of their error; below this share of the largest error that
# is certified, rows are equally sure.
_EQUALLY_SURE = 0.01
# Rows that contradict the others are found out in the first of these rounds, or hardly at all.
_ROUNDS = 3
# A row this many times further off than the rest counts half.
_CONTRADICTION = 2.0
# Residuals (relative, squared) under this are rounding, and tell no row from another.
_EXACT = 1e-22
# A matrix that contradicts the certified patterns this many times as much as they contradict
# each other, or as their residuals allow untested, is outside. In a trial of layers of two to
# four heads and three or four tokens at scales of 1 to 4, all true heads are inside; with two tokens,
# whose rows give a single equation, some are three times too far off.
_SLACK, _RESIDUAL_SLACK = 5.5, 4.0
# The accuracy that log-odds have at best; keeps the body of an exactly solved single head fat
# enough that rounding does not push its own matrix out.
_SLACK_FLOOR = 1e-7
_RANK_TOLERANCE = 1e-10
# A vertex row promises log-odds at least this large or is no use.
_LEAST_PROMISE = 0.5
# Relative precision of a pattern entry at best, whatever the residual.
_ROUNDING = 1e-14


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """``{t : (t - centre)^T M (t - centre) <= slack^2}``: what the interior rows allow."""

    centre: Array
    eigenvalues: Array
    eigenvectors: Array
    slack: float


def interior_ellipsoid(rows: Rows, fit: RowFit, inner: Array, width: int) -> Ellipsoid:
    """Return the ellipsoid of the equalities of the certified interior rows.

    Rows are weighted by the inverse of their residual, which is the square of how far the heads
    are apart on them. A row whose residual is small by chance shows in contradicting the
    others; a few rounds of reweighting (Cauchy's weights) make it harmless.
    """
    dimension = width * rows.tokens.shape[2]
    if not inner.any():
        return Ellipsoid(np.zeros(dimension), np.zeros(dimension), np.eye(dimension), _SLACK_FLOOR)
    equations = _Equations(rows, fit, inner, width)
    weights = equations.weights
    for _ in range(_ROUNDS):
        moment, right, _ = equations.moments(weights)
        shift = 1e-12 * max(float(np.trace(moment)) / dimension, 1e-300)
        factor = cho_factor(moment + shift * np.eye(dimension), check_finite=False)
        misses = equations.misses(cho_solve(factor, right, check_finite=False))
        typical = max(float(weights @ misses / weights.sum()), _SLACK_FLOOR**2)
        weights = equations.weights / (1.0 + misses / (_CONTRADICTION**2 * typical))
    moment, right, power = equations.moments(weights)
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, 0.0)
    held = values > _RANK_TOLERANCE * max(float(values[-1]), 1e-300)
    coordinates = np.where(held, (vectors.T @ right) / np.where(held, values, 1.0), 0.0)
    unexplained = max(power - float(coordinates @ (vectors.T @ right)), 0.0)
    # A fit leaves only its degrees of freedom unexplained, and none where rows are few. What no
    # further equation has tested is granted as far as the residuals allow it.
    tested = 1.0 - np.count_nonzero(held) / equations.n_equations
    contradiction = unexplained / tested if tested > 0.0 else 0.0
    granted = min(1.0, 1.0 - tested) * float(weights @ equations.granted / weights.sum())
    slack = np.sqrt(_SLACK**2 * contradiction + _RESIDUAL_SLACK**2 * granted)
    slack = max(float(slack), _SLACK_FLOOR * max(1.0, float(np.sqrt(power))))
    return Ellipsoid(vectors @ coordinates, values, vectors, slack)


class _Equations:
    """Log-odds of the interior rows, ``<t, q (x_b - x_b')^T> = log(p_b / p_b')``.

    Centred in each row by the pattern itself, so that a token of weight p_b counts p_b times:
    the log-odds of rare tokens are the least certain.
    """

    def __init__(self, rows: Rows, fit: RowFit, inner: Array, width: int) -> None:
        samples, queries_at = np.nonzero(inner)
        self.patterns, tokens = fit.patterns[samples, queries_at], rows.tokens[samples]
        self.queries = with_constant(rows.queries[samples, queries_at], width)
        log_odds = np.log(self.patterns)
        self.centred = tokens - np.einsum("rb,rbd->rd", self.patterns, tokens)[:, None]
        self.heights = log_odds - np.einsum("rb,rb->r", self.patterns, log_odds)[:, None]
        spread = (self.patterns[:, :, None] * self.centred).transpose(0, 2, 1) @ self.centred
        pairs = self.queries[:, :, None] * self.queries[:, None]
        # Both are symmetric, and a quarter of their products tells the rest.
        self.of_queries, self.of_keys = upper(width), upper(tokens.shape[2])
        self.pairs = pairs.reshape(len(pairs), -1)[:, self.of_queries.flat]
        self.spread = spread.reshape(len(spread), -1)[:, self.of_keys.flat]
        errors = fit.error[samples, queries_at]
        floor = max(_EQUALLY_SURE * float(errors.max()), _EXACT)
        self.weights = rows.weights[samples] / (errors + floor)
        self.n_equations = len(samples) * (tokens.shape[1] - 1)
        # The weighted squared log-odds that the residual leaves open, row by row.
        open_weight = _open_weights(fit, samples, queries_at)
        self.granted = np.einsum("rb,rb->r", open_weight**2, 1.0 / self.patterns)

    def moments(self, weights: Array) -> tuple[Array, Array, float]:
        """Return the weighted normal equations and the power of their right side."""
        weights = weights / weights.sum()
        width, d = self.queries.shape[1], self.centred.shape[2]
        block = (weights[:, None] * self.pairs).T @ self.spread
        moment = block[self.of_queries.place[:, None], self.of_keys.place].reshape(width, width, d, d)
        moment = moment.transpose(0, 2, 1, 3).reshape(width * d, -1)
        raised = ((self.patterns * self.heights)[:, None] @ self.centred)[:, 0]
        right = (weights[:, None] * self.queries).T @ raised
        power = float(np.einsum("r,rb,rb->", weights, self.patterns, self.heights**2))
        return moment, right.ravel(), power

    def misses(self, vector: Array) -> Array:
        """Return each row's weighted squared log-odds residual."""
        keys = self.queries @ vector.reshape(self.queries.shape[1], -1)
        scores = (self.centred @ keys[:, :, None])[:, :, 0]
        return np.asarray(np.einsum("rb,rb->r", self.patterns, (self.heights - scores) ** 2))


def half_spaces(
    rows: Rows, fit: RowFit, outer: Array, width: int, margin: float
) -> tuple[Array, Array, Array]:
    """Return the half-spaces of the vertex rows, those that promise most first.

    Their normals ``q (x_b - x_b')^T`` as queries and gaps, and what log-odds they promise: the
    measured ones less `margin`. Heads that give different small weights to a token leave
    a blend of them in the pattern and the rest in the residual, so a token is granted both: its
    entry, and the weight with which it alone would make a residual of that size.
    """
    samples, queries_at = np.nonzero(outer)
    patterns, d = fit.patterns[samples, queries_at], rows.tokens.shape[2]
    chosen = patterns.argmax(axis=1)
    granted = np.abs(patterns) + _open_weights(fit, samples, queries_at)
    promised = np.log(patterns.max(axis=1))[:, None] - np.log(np.maximum(granted, _ROUNDING)) - margin
    gaps = rows.tokens[samples, chosen][:, None] - rows.tokens[samples]
    # A token equal to the chosen one, and so itself, gives no gap and promises nothing.
    useless = (gaps == 0.0).all(axis=2) | (rows.queries[samples, queries_at] == 0.0).all(axis=1)[:, None]
    promised[useless] = -np.inf
    order = np.argsort(-promised, axis=None, kind="stable")[: most_half_spaces(width * d)]
    order = order[promised.ravel()[order] >= _LEAST_PROMISE]
    at, other = np.unravel_index(order, promised.shape)
    queries = with_constant(rows.queries[samples[at], queries_at[at]], width)
    return queries, gaps[at, other], promised[at, other]


def _open_weights(fit: RowFit, samples: Array, queries_at: Array) -> Array:
    """Return the weight with which each token alone would make a residual of the row's size."""
    inverse = fit.inverse[samples]
    last = np.einsum("nij->n", inverse)
    per_token = np.concatenate([np.einsum("nii->ni", inverse), last[:, None]], axis=1)
    residual = fit.residual[samples, queries_at]
    size = np.einsum("no,no->n", residual, residual)
    return np.asarray(np.sqrt(size[:, None] * np.maximum(per_token, 0.0)))


def with_constant(queries: Array, width: int) -> Array:
    """Return queries of that width, the constant 1 of the affine map appended if it is missing."""
    if queries.shape[1] == width:
        return queries
    return np.concatenate([queries, np.ones((len(queries), 1))], axis=1)
