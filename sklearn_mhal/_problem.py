"""The least-squares problem: rows, labels, penalties, and its linear half solved exactly.

For fixed attention the model is linear, ``Y ~ D W`` with the design ``D = [phi_1, ..., phi_m]``
(and a column of ones for the intercept), so ``W`` is a least-squares solution and only the
attention remains: variable projection (Golub and Pereyra 1973).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky
from scipy.linalg.lapack import dtrtri

from ._forward import Array, TokenRows
from ._threads import in_parts, sum_in_parts

# A residual above this share of the labels (squared) owes nothing to rounding.
_PLAIN = 1e-6
# Label power about the mean below this share of all there is, is rounding.
_CONSTANT = 1e-24
# Pooled tokens of a mean square below this are rounding.
_VANISHED = 1e-12
_LARGEST_SCORE = 1e8


@dataclass(frozen=True)
class Regression:
    """Projections for given attention: the linear half of the problem."""

    projection: Array
    """``(m * d, d_out)``."""
    intercept: Array
    """``(d_out,)``, zeros if none is fitted."""
    residual: Array
    """``(n_rows, d_out)``, weighted."""
    loss: float
    """``|residual|^2`` plus the ridge term."""
    design: Array
    factor: Array

    def orthonormal(self, rows: slice = slice(None)) -> Array:
        """Return some rows of a basis ``Z`` with ``I - Z Z^T`` the projector that removes the design."""
        return np.asarray(self.design[rows] @ self.inverse_factor.T)

    @cached_property
    def inverse_factor(self) -> Array:
        """``L^-1``, where ``L`` is `factor`."""
        return inverse_lower(self.factor)


def factorise(gram: Array, *, n_rows: int = 0) -> Array:
    """Return the lower Cholesky factor of the Gram matrix of some rows, which is overwritten.

    A floor makes it exist where heads coincide; refinement and the residual, computed from the
    labels themselves, do not feel it elsewhere. White tokens that average to less than rounding
    explain nothing.
    """
    diagonal = np.einsum("ii->i", gram)
    floor = 1e-14 * max(float(diagonal.max(initial=1e-300)), _VANISHED * n_rows)
    while True:
        try:
            diagonal += floor
            return np.asarray(cholesky(gram, lower=True, check_finite=False))
        except LinAlgError:
            floor *= 100.0


def inverse_lower(factor: Array) -> Array:
    """Return the inverse of a lower triangular matrix that has one, such as a Cholesky factor."""
    inverse, _ = dtrtri(factor, lower=1)
    return np.asarray(inverse)


def regress(
    pooled: Array,
    labels: Array,
    *,
    row_scale: Array | None,
    fit_intercept: bool,
    ridge: float,
    parts: Sequence[slice] = (slice(None),),
) -> Regression:
    """Solve for the projections by normal equations, with one step of iterative refinement if it shows.

    Threads share the rows in `parts`.
    """
    n_columns = pooled.shape[1]
    design = pooled
    if fit_intercept:
        ones = np.ones(len(pooled)) if row_scale is None else row_scale
        design = np.concatenate([pooled, ones[:, None]], axis=1)
    gram, right = _products(design, labels, parts)
    np.einsum("ii->i", gram)[:n_columns] += ridge
    factor = factorise(gram, n_rows=len(design))
    solution = cho_solve((factor, True), right, check_finite=False)

    def residual_of(part: slice) -> Array:
        return np.asarray(labels[part] - design[part] @ solution)

    residual = _stacked(in_parts(residual_of, parts))
    if np.vdot(residual, residual) <= _PLAIN * np.vdot(labels, labels):
        defect: Array = sum_in_parts(lambda part: design[part].T @ residual[part], parts)
        defect[:n_columns] -= ridge * solution[:n_columns]
        solution += cho_solve((factor, True), defect, check_finite=False)
        residual = _stacked(in_parts(residual_of, parts))
    projection = solution[:n_columns]
    return Regression(
        projection=projection,
        intercept=solution[-1] if fit_intercept else np.zeros(labels.shape[1]),
        residual=residual,
        loss=float(np.vdot(residual, residual) + ridge * np.vdot(projection, projection)),
        design=design,
        factor=factor,
    )


def _products(design: Array, labels: Array, parts: Sequence[slice]) -> tuple[Array, Array]:
    """Return the Gram matrix of the design and its products with the labels."""
    pairs = in_parts(lambda part: (design[part].T @ design[part], design[part].T @ labels[part]), parts)
    gram, right = pairs[0]
    for more_gram, more_right in pairs[1:]:
        gram += more_gram
        right += more_right
    return gram, right


def _stacked(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass
class Problem:
    """One nonlinear least-squares problem: rows, labels, penalties.

    ``|Y - F(attention)|^2 + ridge |W|^2 + attention_ridge |attention|^2``, with `labels` already
    multiplied by the root weights of `rows`.
    """

    rows: TokenRows
    labels: Array
    fit_intercept: bool = False
    ridge: float = 0.0
    attention_ridge: float = 0.0
    label_power: float = field(init=False)
    query_moment: Array = field(init=False)

    def __post_init__(self) -> None:
        centred = self.labels
        if self.fit_intercept and len(centred):
            scale = self.rows.row_scale
            ones = np.ones(len(centred)) if scale is None else scale
            mean = ones @ centred / max(float(ones @ ones), 1e-300)
            centred = centred - ones[:, None] * mean
        # Labels come with unit power; constant ones leave rounding, and one sample nothing.
        power, rounding = float(np.vdot(centred, centred)), _CONSTANT * max(centred.size, 1)
        self.label_power = max(power, rounding)
        queries = self.rows.queries
        moment = queries.T @ queries / max(len(queries), 1)
        # Tokens of zeros only have no scale, and any does.
        floor = 1e-8 * (float(np.trace(moment)) / len(moment) or 1.0)
        self.query_moment = moment + floor * np.eye(len(moment))

    @cached_property
    def single_rows(self) -> TokenRows:
        """The rows in single precision."""
        return self.rows.single()

    def penalised(self, ridge: float, attention_ridge: float) -> Problem:
        """Return the same equations with other penalties, a mean over rows."""
        n_rows = float(self.rows.n_rows)
        return replace(self, ridge=ridge * n_rows, attention_ridge=attention_ridge * n_rows)

    def evaluate(self, attention: Array) -> State:
        """Return everything known at one attention, the projections included."""
        parts = self.rows.shares(attention.shape[1])
        found = in_parts(lambda part: self._forward(part, attention), parts)
        patterns, pooled = (_stacked([pair[at] for pair in found]) for at in range(2))
        regression = regress(
            pooled,
            self.labels,
            row_scale=self.rows.row_scale,
            fit_intercept=self.fit_intercept,
            ridge=self.ridge,
            parts=[self.rows.rows_of(part) for part in parts],
        )
        penalty = self.attention_ridge * float(np.vdot(attention, attention))
        return State(attention, patterns, regression, (regression.loss + penalty) / self.label_power)

    def _forward(self, part: slice, attention: Array) -> tuple[Array, Array]:
        rows = self.rows.between(part)
        patterns = rows.patterns(attention)
        return patterns, rows.pooled(patterns)


@dataclass(frozen=True)
class State:
    """The solver's position."""

    attention: Array
    patterns: Array
    regression: Regression
    error: float
    """Loss relative to the centred label power; without penalties the relative squared residual."""


def bounded(attention: Array) -> Array:
    """Return stacked attention for white tokens kept where scores still have digits.

    Patterns to noise are best when infinitely hard, and are as hard as any long before.
    """
    return np.clip(attention, -_LARGEST_SCORE, _LARGEST_SCORE)
