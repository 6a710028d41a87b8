"""The forward map of attention and its derivative products, on arrays.

Everything that evaluates or differentiates attention goes through :class:`TokenRows`:
the public layer, every stage and the solver. Two conventions hold throughout.

*Stacked attention.* The attention matrices of all heads stand side by side in one array
of shape ``(q, m * d)``: columns ``i * d : (i + 1) * d`` are ``Theta_i``. Here ``q = d``, or
``q = d + 1`` for the affine map, whose queries end in a constant 1 so that the last row
holds the key biases ``u_i``.

*Stacked projections.* ``W`` has shape ``(m * d, d_out)``: rows ``i * d : (i + 1) * d`` are ``W_i``.

In these terms, with ``p_i = softmax_b(query^T Theta_i x_b)`` and ``phi_i = p_i^T X``::

    y = [phi_1, ..., phi_m] W

one large product with ``Theta`` and one with ``W``, and in between only products of the
size of one sample. The derivative of ``phi_i W_i`` in the direction ``dTheta_i`` is
``sum_b dp_b (x_b W_i)`` with ``dp = p * (dl - <p, dl>)`` and ``dl_b = query^T dTheta_i x_b``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ._memory import samples_per_chunk

Array = np.ndarray[Any, np.dtype[Any]]
Readout = Literal["tokens", "first", "mean"]

# Queries times columns of attention: a product with so many takes a millisecond, and to wake a thread
# twice a tenth of one.
_NUMBERS_PER_SHARE = 180_000
_MOST_SHARES = 32


def stack_attention(attention: Array, key_bias: Array | None = None) -> Array:
    """Put ``(m, d, d)`` attention matrices (and ``(m, d)`` key biases) side by side."""
    n_heads, width, n_features = attention.shape
    stacked = attention.transpose(1, 0, 2).reshape(width, n_heads * n_features)
    if key_bias is None:
        return np.ascontiguousarray(stacked)
    return np.concatenate([stacked, key_bias.reshape(1, -1)])


def unstack_attention(stacked: Array, n_features: int) -> tuple[Array, Array]:
    """Split stacked attention into ``(m, d, d)`` matrices and ``(m, d)`` key biases.

    The key biases are zeros where the stacked queries carry no constant.
    """
    n_heads = stacked.shape[1] // n_features
    blocks = stacked.reshape(-1, n_heads, n_features).transpose(1, 0, 2)
    attention = np.ascontiguousarray(blocks[:, :n_features])
    if len(stacked) == n_features:
        return attention, np.zeros((n_heads, n_features), dtype=stacked.dtype)
    return attention, np.ascontiguousarray(blocks[:, n_features])


def softmax_inplace(logits: Array) -> Array:
    """Softmax along the last axis, overwriting its argument.

    The maximum is taken column by column: the last axis is a handful of tokens, where
    numpy's own reduction spends its time on bookkeeping.
    """
    largest = logits[..., 0].copy()
    for token in range(1, logits.shape[-1]):
        np.maximum(largest, logits[..., token], out=largest)
    logits -= largest[..., None]
    np.exp(logits, out=logits)
    logits /= np.einsum("...b->...", logits)[..., None]
    return logits


class TokenRows:
    """The equations that some samples give, laid out for the forward map.

    Parameters
    ----------
    tokens : ndarray of shape (n, k, d)
        Any numeric dtype; converted to `dtype` here, so keep `n` to a chunk.
    affine : bool
        Whether queries end in a constant 1 (key biases).
    readout : {"tokens", "first", "mean"}
        Which outputs exist: one row per token, the first row, or the mean of the rows.
    root_weights : ndarray of shape (n,) or None
        Square roots of the sample weights. They multiply every equation of a sample.
    """

    def __init__(
        self,
        tokens: Array,
        *,
        affine: bool = False,
        readout: Readout = "tokens",
        root_weights: Array | None = None,
        dtype: Any = np.float64,
    ) -> None:
        self.tokens = np.ascontiguousarray(tokens, dtype=dtype)
        self.n_samples, self.n_tokens, self.n_features = self.tokens.shape
        # OpenBLAS multiplies small matrices fastest when neither is transposed.
        self.keys = np.ascontiguousarray(self.tokens.transpose(0, 2, 1))
        queries = self.tokens[:, :1] if readout == "first" else self.tokens
        self.n_queries = queries.shape[1]
        if affine:
            ones = np.ones((*queries.shape[:2], 1), dtype=dtype)
            queries = np.concatenate([queries, ones], axis=2)
        self.queries = np.ascontiguousarray(queries).reshape(-1, queries.shape[2])
        self.averages = readout == "mean"
        self.rows_per_sample = 1 if self.averages else self.n_queries
        self.n_rows = self.n_samples * self.rows_per_sample
        self.root_weights = root_weights
        self.row_scale = None if root_weights is None else np.repeat(root_weights, self.rows_per_sample)

    def single(self) -> TokenRows:
        """Return the same rows in single precision."""
        other = copy.copy(self)
        for name in ("tokens", "keys", "queries"):
            setattr(other, name, getattr(self, name).astype(np.float32))
        return other

    def between(self, part: slice) -> TokenRows:
        """Return the rows of some samples, as views."""
        other = copy.copy(self)
        other.tokens, other.keys = self.tokens[part], self.keys[part]
        other.n_samples = len(other.tokens)
        other.n_rows = other.n_samples * self.rows_per_sample
        other.queries = self.queries[part.start * self.n_queries : part.stop * self.n_queries]
        if self.root_weights is not None and self.row_scale is not None:
            other.root_weights = self.root_weights[part]
            other.row_scale = self.row_scale[self.rows_of(part)]
        return other

    def rows_of(self, part: slice) -> slice:
        """Return where the equations of some samples are."""
        return slice(part.start * self.rows_per_sample, part.stop * self.rows_per_sample)

    def shares(self, n_columns: int) -> list[slice]:
        """Return the samples in parts that are worth a thread each, for that many columns of attention.

        Their number depends on nothing else, so that no result depends on the number of threads.
        """
        numbers = len(self.queries) * n_columns
        n_parts = min(1 << max(numbers // _NUMBERS_PER_SHARE, 1).bit_length() - 1, _MOST_SHARES)
        ends = [self.n_samples * at // n_parts for at in range(n_parts + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def patterns(self, attention: Array) -> Array:
        """Return the attention patterns, shape ``(n, n_queries * m, k)``, queries outermost."""
        n_heads = attention.shape[1] // self.n_features
        projected = (self.queries @ attention).reshape(
            self.n_samples, self.n_queries * n_heads, self.n_features
        )
        return softmax_inplace(projected @ self.keys)

    def pooled(self, patterns: Array) -> Array:
        """Return ``[phi_1, ..., phi_m]``, one row an equation, weighted: ``(n_rows, m * d)``."""
        n_heads = patterns.shape[1] // self.n_queries
        pooled = patterns @ self.tokens
        if self.averages:
            pooled = pooled.reshape(self.n_samples, self.n_queries, -1).mean(axis=1)
        pooled = pooled.reshape(self.n_rows, n_heads * self.n_features)
        if self.row_scale is not None:
            pooled *= self.row_scale[:, None]
        return pooled

    def values(self, projection: Array) -> Array:
        """Return the projected tokens ``x_b W_i``, weighted, of shape ``(n, m * k, d_out)``."""
        n_outputs = projection.shape[1]
        n_heads = projection.shape[0] // self.n_features
        side_by_side = (
            projection.reshape(n_heads, self.n_features, n_outputs)
            .transpose(1, 0, 2)
            .reshape(self.n_features, n_heads * n_outputs)
        )
        values = self.tokens.reshape(-1, self.n_features) @ side_by_side
        values = (
            values.reshape(self.n_samples, self.n_tokens, n_heads, n_outputs)
            .transpose(0, 2, 1, 3)
            .reshape(self.n_samples, n_heads * self.n_tokens, n_outputs)
        )
        if self.averages:
            values /= self.n_queries
        if self.root_weights is not None:
            values *= self.root_weights[:, None, None]
        return values

    def pattern_change(self, direction: Array, patterns: Array) -> Array:
        """Return ``dp`` for a change of the stacked attention, in the shape of `patterns`."""
        change = (self.queries @ direction).reshape(self.n_samples, -1, self.n_features) @ self.keys
        change -= np.einsum("nab,nab->na", patterns, change)[..., None]
        change *= patterns
        return change

    @staticmethod
    def transposed(values: Array) -> Array:
        """Return values transposed within each sample, contiguous: ``(n, d_out, m * k)``."""
        return np.ascontiguousarray(values.transpose(0, 2, 1))

    def forward_product(self, direction: Array, patterns: Array, values: Array) -> Array:
        """Return the change of the outputs for a change of the attention: ``(n_rows, d_out)``."""
        change = self.pattern_change(direction, patterns)
        change = change.reshape(self.n_samples, self.n_queries, -1)
        if self.averages:
            change = change.sum(axis=1, keepdims=True)
        return (change @ values).reshape(self.n_rows, values.shape[2])

    def backward_product(
        self, residual: Array, patterns: Array, values: Array, transposed: Array | None = None
    ) -> Array:
        """Return the gradient of ``<residual, output>`` in the stacked attention.

        The adjoint of :meth:`forward_product`. Callers that take many products at one position
        pass the values as :meth:`transposed` gives them too.
        """
        n_outputs = values.shape[2]
        if transposed is None:
            transposed = self.transposed(values)
        pull = residual.reshape(self.n_samples, self.rows_per_sample, n_outputs) @ transposed
        if self.averages:
            pull = np.repeat(pull, self.n_queries, axis=1)
        pull = pull.reshape(patterns.shape)
        pull -= np.einsum("nab,nab->na", patterns, pull)[..., None]
        pull *= patterns
        gathered = (pull @ self.tokens).reshape(len(self.queries), -1)
        return self.queries.T @ gathered


def token_chunks(tokens: Array, *, n_heads: int, n_outputs: int, n_copies: int = 3) -> Iterator[slice]:
    """Yield slices of samples whose forward pass stays inside scikit-learn's working memory."""
    n_samples, n_tokens, n_features = tokens.shape
    per_token = n_heads * (2 * n_features + n_copies * n_tokens) + n_copies * (n_features + n_outputs)
    size = samples_per_chunk(8 * n_tokens * per_token, n_samples)
    for start in range(0, n_samples, size):
        yield slice(start, min(start + size, n_samples))
