"""Interaction moments: the span from third-order statistics, for when few rows agree.

With the part of y that is linear in query and tokens removed, the operator

    M[(p, r), (s, c)] = mean over queries a and token pairs b != b', both != a, of
                        x_a[p] x_b'[r] x_b[s] y_a[c]

is close to ``const * sum_i Theta_i (x) W_i``, so its leading left singular vectors span the
attention matrices and their number counts the heads. The operator is never formed: one product
costs ``O(rows d (d + d_out))`` a column. What is really seen is symmetric in (r, s),
``Theta[p, r] W[s, c] + Theta[p, s] W[r, c]``: harmless for incoherent heads of full rank, misleading
for heads of low rank, blind for two tokens. A starting point, never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array

_OVERSAMPLING = 4
_POWER_STEPS = 1
# Blocks up to this size are kept between passes instead of being made anew.
_KEPT_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class MomentSpan:
    """Leading singular structure of the moment operator."""

    basis: Array
    """(r, d, d): orthonormal directions of the attention matrices, internal units."""
    singular_values: Array
    """(r + 1,), descending."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of some samples, ready for contraction."""

    tokens: Array
    """(n, k, d)."""
    residual: Array
    """(n, r, d_out): labels without their linear part, times the weight."""
    others: Array
    """(r, k): 1 where a token is not the query's own."""


def _design(tokens: Array, n_rows: int, averaged: bool) -> Array:
    """Query, sum of tokens and a constant for every label row."""
    total = np.repeat(tokens.sum(axis=1, keepdims=True), n_rows, axis=1)
    query = tokens.mean(axis=1, keepdims=True) if averaged else tokens[:, :n_rows]
    return np.concatenate([query, total, np.ones((*query.shape[:2], 1))], axis=2)


def _linear_part(examples: Examples, averaged: bool) -> Array:
    width = 2 * examples.n_features + 1
    gram, right = np.zeros((width, width)), np.zeros((width, examples.n_outputs))
    for chunk in examples.chunks(1):
        labels = chunk.white_labels()
        design = _design(chunk.white_tokens(), labels.shape[1], averaged).reshape(-1, width)
        weighted = design
        if chunk.weights is not None:
            weighted = design * np.repeat(chunk.weights, labels.shape[1])[:, None]
        gram += weighted.T @ design
        right += weighted.T @ labels.reshape(-1, examples.n_outputs)
    return np.linalg.lstsq(gram, right, rcond=None)[0]


def _blocks(examples: Examples, linear: Array, n_columns: int) -> Iterator[_Block]:
    averaged = examples.readout == "mean"
    k = examples.n_tokens
    for chunk in examples.chunks(n_columns):
        tokens, labels = chunk.white_tokens(), chunk.white_labels()
        residual = labels - _design(tokens, labels.shape[1], averaged) @ linear
        if chunk.weights is not None:
            residual *= chunk.weights[:, None, None]
        if averaged:
            # The mean of the rows is every query's label, up to the other queries' terms,
            # which are uncorrelated with this one's products.
            residual = np.repeat(residual, k, axis=1)
        n_rows = residual.shape[1]
        # Single precision: what chance leaves in the moments is far above its rounding.
        others = 1.0 - np.eye(n_rows, k, dtype=np.float32)
        yield _Block(tokens.astype(np.float32), residual.astype(np.float32), others)


def _pair_sums(block: _Block, vectors: Array) -> Array:
    """``sum over b != b' (both not a) of x_b' (x_b . v)`` for (n, r, d, l) vectors."""
    scores = block.tokens[:, None] @ vectors
    scores *= block.others[None, :, :, None]
    rest = (scores.sum(axis=2, keepdims=True) - scores) * block.others[None, :, :, None]
    return block.tokens.transpose(0, 2, 1)[:, None] @ rest


def _right_product(block: _Block, columns: Array) -> Array:
    """``M @ columns`` for columns of shape (d, d_out, l), this block's part, (d, d, l)."""
    d, n_outputs, n_columns = columns.shape
    n_rows = block.residual.shape[1]
    flat = block.residual.reshape(-1, n_outputs) @ columns.transpose(1, 0, 2).reshape(n_outputs, -1)
    sums = _pair_sums(block, flat.reshape(-1, n_rows, d, n_columns))
    queries = block.tokens[:, :n_rows].reshape(-1, d)
    return (queries.T @ sums.reshape(len(queries), -1)).reshape(d, d, n_columns)


def _left_product(block: _Block, columns: Array) -> Array:
    """``M^T @ columns`` for columns of shape (d, d, l), this block's part, (d, d_out, l)."""
    d, _, n_columns = columns.shape
    n_rows = block.residual.shape[1]
    queries = block.tokens[:, :n_rows].reshape(-1, d)
    vectors = (queries @ columns.reshape(d, -1)).reshape(-1, n_rows, d, n_columns)
    sums = _pair_sums(block, vectors).reshape(len(queries), -1)
    product = sums.T @ block.residual.reshape(len(queries), -1)
    return product.reshape(d, n_columns, -1).transpose(0, 2, 1)


def moment_span(examples: Examples, *, n_directions: int, generator: np.random.Generator) -> MomentSpan:
    """Return the leading directions by a randomised singular value decomposition.

    Parameters
    ----------
    examples : Examples
        At least three tokens a sample.
    n_directions : int
        How many directions to return.
    generator : numpy.random.Generator

    Returns
    -------
    MomentSpan
    """
    d, n_outputs = examples.n_features, examples.n_outputs
    linear = _linear_part(examples, examples.readout == "mean")
    n_columns = min(n_directions + _OVERSAMPLING, d * d, d * n_outputs)

    def blocks() -> Iterator[_Block]:
        return _blocks(examples, linear, n_columns)

    per_sample = examples.n_tokens * (d + max(n_outputs, d * n_columns))
    kept = list(blocks()) if 8 * examples.n_samples * per_sample <= _KEPT_BYTES else None

    def right(columns: Array) -> Array:
        columns = columns.reshape(d, n_outputs, -1).astype(np.float32)
        parts = (_right_product(block, columns) for block in kept or blocks())
        return np.asarray(sum(parts), dtype=np.float64).reshape(d * d, -1)

    def left(columns: Array) -> Array:
        columns = columns.reshape(d, d, -1).astype(np.float32)
        parts = (_left_product(block, columns) for block in kept or blocks())
        return np.asarray(sum(parts), dtype=np.float64).reshape(d * n_outputs, -1)

    sketch = np.linalg.qr(right(generator.standard_normal((d * n_outputs, n_columns))))[0]
    for _ in range(_POWER_STEPS):
        sketch = np.linalg.qr(right(np.linalg.qr(left(sketch))[0]))[0]
    small = left(sketch)
    _, values, rotation = np.linalg.svd(small, full_matrices=False)
    basis = (sketch @ rotation.T).T.reshape(-1, d, d)
    return MomentSpan(basis=basis[:n_directions], singular_values=values[: n_directions + 1])
