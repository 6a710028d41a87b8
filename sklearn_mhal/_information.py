"""The information matrix of a layer: how sharply the equations determine its parameters.

With ``D`` the design (pooled tokens and a constant) and ``J`` the derivative of the outputs in the
attention, the Gauss-Newton matrix in (attention, projections) is

    [ A    B          ]      A = J^T J,   B = J^T (D (x) I),   G = D^T D,
    [ B^T  G (x) I    ]

and everything of interest follows from ``G`` and the Schur complement ``S = A - B (G^-1 (x) I) B^T``,
the information on the attention when the projections are unknown. Row r contributes
``q q^T (x) C C^T`` to A, where ``C`` stacks ``C_i = Cov_{p_i}(x) W_i``, so A is one product of large
matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from ._forward import Array, TokenRows
from ._memory import samples_per_chunk
from ._problem import Problem, factorise


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

    def schur(self, *, ridge: float = 0.0) -> Array:
        """Return S, symmetric, under a penalty on the projections."""
        n_outputs = self.cross.shape[2]
        gram = self.gram.copy()
        np.einsum("ii->i", gram)[: len(self.attention) // self.query_width] += ridge
        factor = factorise(gram)
        schur = self.attention.copy()
        for output in range(n_outputs):
            half = solve_triangular(factor, self.cross[:, :, output].T, lower=True, check_finite=False)
            schur -= half.T @ half
        return 0.5 * (schur + schur.T)


def head_covariances(rows: TokenRows, patterns: Array, projection: Array) -> Array:
    """Return ``C``, of shape (n_queries of all samples, m * d, d_out): the derivative's key side."""
    values = rows.values(projection)
    n_outputs = values.shape[2]
    values = values.reshape(rows.n_samples, 1, -1, rows.n_tokens, n_outputs)
    used = patterns.reshape(rows.n_samples, rows.n_queries, -1, rows.n_tokens)
    means = np.einsum("nqmb,numbo->nqmo", used, values, optimize=True)
    spread = (values - means[:, :, :, None]) * used[..., None]
    stacked = rows.keys[:, None, None] @ spread
    return stacked.reshape(rows.n_samples * rows.n_queries, -1, n_outputs)


def information(problem: Problem, attention: Array, projection: Array) -> Information:
    """Return the information of a problem's equations at a layer.

    Parameters
    ----------
    problem : Problem
        Held in memory; memory and time grow with its rows times ``(q m d)`` and ``(m d)^2``.
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
    keys = head_covariances(rows, patterns, projection)
    n_queries, size, n_outputs = keys.shape
    width = rows.queries.shape[1]
    if rows.averages:
        # The derivative of an averaged row is the sum of its queries' rank-one terms.
        return _averaged(rows, design, keys)
    block = np.zeros((width**2, size**2))
    cross = np.zeros((n_outputs, width * size, design.shape[1]))
    # The rows' products are much larger than the rows.
    step = samples_per_chunk(8 * (width**2 + size**2 + width * size), n_queries)
    for start in range(0, n_queries, step):
        queries, own = rows.queries[start : start + step], keys[start : start + step]
        pairs = (queries[:, :, None] * queries[:, None, :]).reshape(len(queries), -1)
        block += pairs.T @ (own @ own.transpose(0, 2, 1)).reshape(len(queries), -1)
        for output in range(n_outputs):
            left = (queries[:, :, None] * own[:, None, :, output]).reshape(len(queries), -1)
            cross[output] += left.T @ design[start : start + step]
    block = block.reshape(width, width, size, size).transpose(0, 2, 1, 3).reshape((width * size,) * 2)
    return Information(block, cross.transpose(1, 2, 0), design.T @ design, width)


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


def inverse_diagonals(info: Information) -> tuple[Array, Array]:
    """Return the diagonal of the inverse information, attention and projection parts.

    The second has shape (m d (+ 1), d_out).
    """
    schur = factorise(info.schur())
    gram = factorise(info.gram.copy())
    half = solve_triangular(schur, np.eye(len(schur)), lower=True, check_finite=False)
    attention = np.einsum("ij,ij->j", half, half)
    own = np.einsum("ii->i", cho_solve((gram, True), np.eye(len(gram)), check_finite=False))
    projection = np.empty((len(gram), info.cross.shape[2]))
    for output in range(info.cross.shape[2]):
        # G^-1 B_o^T S^-1 B_o G^-1: what not knowing the attention adds.
        carried = solve_triangular(schur, info.cross[:, :, output], lower=True, check_finite=False)
        added = cho_solve((gram, True), carried.T, check_finite=False)
        projection[:, output] = own + np.einsum("ij,ij->i", added, added)
    return attention, projection
