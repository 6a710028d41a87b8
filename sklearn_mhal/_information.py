"""The information matrix of a layer: how sharply the equations determine its parameters.

With ``D`` the design (pooled tokens and a constant) and ``J`` the derivative of the outputs in the
attention, the Gauss-Newton matrix in (attention, projections) is

    [ A    B          ]      A = J^T J,   B = J^T (D (x) I),   G = D^T D,
    [ B^T  G (x) I    ]

and everything of interest follows from ``G`` and the Schur complement ``S = A - B (G^-1 (x) I) B^T``,
the information on the attention when the projections are unknown. Row r contributes
``q q^T (x) C C^T`` to A, where ``C`` stacks ``C_i = Cov_{p_i}(x) W_i``, so A is one product of large
matrices, a quarter of it by the symmetry of both factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.blas import dsyrk

from ._forward import Array, TokenRows
from ._memory import samples_per_chunk
from ._problem import Problem, factorise, inverse_lower

_LEAST_MIB, _MOST_MIB = 8.0, 64.0


def n_products(width: int, size: int, n_outputs: int) -> int:
    """Return the multiplications that a row costs, for ``q``, ``m d`` and ``d_out``."""
    return (width * size) ** 2 // 4 + width * size**2 * n_outputs


@dataclass(frozen=True, eq=False)
class Information:
    """The blocks, summed over the equations of a problem."""

    attention: Array
    """A, of shape (q m d, q m d), in the order of the stacked attention, (query, head, key)."""
    cross: Array
    """B, of shape (q m d, m d (+ 1), d_out)."""
    gram: Array
    """G, of shape (m d (+ 1), m d (+ 1))."""
    query_width: int
    """q."""

    def __add__(self, other: Information) -> Information:
        return Information(
            self.attention + other.attention,
            self.cross + other.cross,
            self.gram + other.gram,
            self.query_width,
        )

    def schur(self, *, ridge: float = 0.0) -> Array:
        """Return S, symmetric, under a penalty on the projections."""
        gram = self.gram.copy()
        np.einsum("ii->i", gram)[: len(self.attention) // self.query_width] += ridge
        half = self._cross_by(solve_lower(factorise(gram)))
        # Only the upper triangle is computed.
        explained = dsyrk(1.0, half.T)
        explained += np.triu(explained, 1).T
        schur: Array = self.attention - explained
        return schur

    def _cross_by(self, solve: Callable[[Array], Array]) -> Array:
        """Return ``B^T``, outputs outermost, after `solve` for every output: (d_out m d (+ 1), q m d)."""
        size, n_columns, n_outputs = self.cross.shape
        solved = solve(self.cross.transpose(1, 2, 0).reshape(n_columns, -1))
        return solved.reshape(n_columns * n_outputs, size)


def solve_lower(factor: Array) -> Callable[[Array], Array]:
    """Return the solution with a lower triangular matrix as a function of the right-hand side."""

    def solve(right: Array) -> Array:
        return np.asarray(solve_triangular(factor, right, lower=True, check_finite=False))

    return solve


def head_covariances(rows: TokenRows, patterns: Array, values: Array, part: slice) -> Array:
    """Return ``C`` of some samples, (queries, m * d, d_out): the derivative's key side.

    `values` are the projected tokens that ``rows.values`` returns.
    """
    n_outputs = values.shape[2]
    values = values[part].reshape(-1, 1, values.shape[1] // rows.n_tokens, rows.n_tokens, n_outputs)
    used = patterns[part].reshape(len(values), rows.n_queries, -1, rows.n_tokens)
    means = np.einsum("nqmb,numbo->nqmo", used, values, optimize=True)
    spread = (values - means[:, :, :, None]) * used[..., None]
    stacked = rows.keys[part, None, None] @ spread
    return stacked.reshape(len(values) * rows.n_queries, -1, n_outputs)


def information(problem: Problem, attention: Array, projection: Array) -> Information:
    """Return the information of a problem's equations at a layer.

    Parameters
    ----------
    problem : Problem
        Held in memory. Time grows with its rows times `n_products`, memory with ``(q m d)^2``.
    attention : ndarray of shape (q, m * d)
    projection : ndarray of shape (m * d, d_out)

    Returns
    -------
    Information
    """
    rows = problem.rows
    patterns = rows.patterns(attention)
    design = rows.pooled(patterns)
    if problem.fit_intercept:
        ones = np.ones(len(design)) if rows.row_scale is None else rows.row_scale
        design = np.concatenate([design, ones[:, None]], axis=1)
    values = rows.values(projection)
    if rows.averages:
        # The derivative of an averaged row is the sum of its queries' rank-one terms.
        return _averaged(rows, design, head_covariances(rows, patterns, values, slice(None)))
    width, size, n_outputs = rows.queries.shape[1], attention.shape[1], values.shape[2]
    of_queries, of_keys = upper(width), upper(size)
    block = np.zeros((len(of_queries.flat), len(of_keys.flat)))
    cross = np.zeros((width * design.shape[1], size * n_outputs))
    # The rows' products are much larger than the rows; as much as the sums take is no more memory.
    per_row = 8 * (block.shape[0] + block.shape[1] + size * (size + 2 * n_outputs) + len(cross))
    mib = float(np.clip(8 * block.size / 2**20, _LEAST_MIB, _MOST_MIB))
    step = samples_per_chunk(per_row * rows.n_queries, rows.n_samples, mib=mib)
    for start in range(0, rows.n_samples, step):
        own = head_covariances(rows, patterns, values, slice(start, start + step))
        part = slice(start * rows.n_queries, (start + step) * rows.n_queries)
        queries = rows.queries[part]
        pairs = (queries[:, :, None] * queries[:, None, :]).reshape(len(queries), -1)
        products = (own @ own.transpose(0, 2, 1)).reshape(len(queries), -1)
        block += pairs[:, of_queries.flat].T @ products[:, of_keys.flat]
        left = (queries[:, :, None] * design[part, None, :]).reshape(len(queries), -1)
        cross += left.T @ own.reshape(len(queries), -1)
    whole = block[of_queries.place[:, None], of_keys.place].reshape(width, width, size, size)
    by_output = cross.reshape(width, -1, size, n_outputs).transpose(0, 2, 1, 3)
    return Information(
        attention=whole.transpose(0, 2, 1, 3).reshape((width * size,) * 2),
        cross=by_output.reshape(width * size, -1, n_outputs),
        gram=design.T @ design,
        query_width=width,
    )


class Upper(NamedTuple):
    """The upper triangle of symmetric matrices of one size."""

    flat: Array
    """Where its entries are in a flattened matrix."""
    place: Array
    """Where a flattened matrix's entries are among them."""


def upper(size: int) -> Upper:
    """Return the upper triangle of symmetric matrices of that size."""
    first, second = np.triu_indices(size)
    place = np.empty((size, size), dtype=np.intp)
    place[first, second] = place[second, first] = np.arange(len(first))
    return Upper(first * size + second, place.ravel())


def _averaged(rows: TokenRows, design: Array, keys: Array) -> Information:
    width, (_, size, n_outputs) = rows.queries.shape[1], keys.shape
    queries = rows.queries.reshape(rows.n_samples, -1, width)
    keys = keys.reshape(rows.n_samples, -1, size, n_outputs)
    block = np.zeros((width * size,) * 2)
    cross = np.empty((width * size, design.shape[1], n_outputs))
    for output in range(n_outputs):
        derivative = queries.transpose(0, 2, 1) @ keys[..., output]
        derivative = derivative.reshape(rows.n_samples, -1)
        block += derivative.T @ derivative
        cross[:, :, output] = derivative.T @ design
    return Information(block, cross, design.T @ design, width)


def inverse_roots(info: Information) -> tuple[Array, Array, Array]:
    """Return roots of the inverse information: rows that, were they independent unit errors, add up to it.

    Returns
    -------
    attention : ndarray of shape (q m d, q m d)
        ``L^-1`` with ``S = L L^T``: the columns' sums of squares are the variances of the attention.
    alone : ndarray of shape (m d (+ 1), m d (+ 1))
        The same for G: variances of one output's projections, were the attention known.
    carried : ndarray of shape (q m d, m d (+ 1), d_out)
        ``L^-1 B G^-1``: what not knowing it adds, for every output.
    """
    gram = factorise(info.gram.copy())
    n_columns, n_outputs = info.cross.shape[1:]
    back = info._cross_by(lambda right: cho_solve((gram, True), right, check_finite=False))
    schur = factorise(info.schur())
    carried = solve_lower(schur)(back.T).reshape(-1, n_columns, n_outputs)
    return inverse_lower(schur), inverse_lower(gram), carried
