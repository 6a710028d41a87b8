"""Products with the derivative of the equations, the samples shared among threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ._forward import Array, TokenRows
from ._threads import in_parts, sum_in_parts


@dataclass(frozen=True, eq=False)
class Share:
    """What the products read of some samples."""

    rows: TokenRows
    patterns: Array
    values: Array
    """The projected tokens."""
    transposed: Array
    """The same, transposed within each sample."""
    basis: Array
    """``Z``, orthonormal over all samples' rows."""

    def single(self, rows: TokenRows) -> Share:
        """Return the same in single precision, `rows` being so already."""
        values = self.values.astype(np.float32)
        return replace(
            self,
            rows=rows,
            patterns=self.patterns.astype(np.float32),
            values=values,
            transposed=TokenRows.transposed(values),
            basis=self.basis.astype(np.float32),
        )

    def gradient(self, residual: Array) -> Array:
        """Return these rows' share of the gradient of ``<residual, output>``."""
        return self.rows.backward_product(residual, self.patterns, self.values, self.transposed)

    def forward(self, direction: Array) -> tuple[Array, Array]:
        """Return the change of the outputs, and these rows' share of ``Z^T`` times it."""
        change = self.rows.forward_product(direction, self.patterns, self.values)
        return change, self.basis.T @ change

    def head_block(self, n_seen: int, first: int) -> Array:
        """Return ``sum over rows of C C^T``, every sample seen through `n_seen` of the outputs.

        They go round with the sample's number; `first` is that of the first here.
        """
        rows, values = self.rows, self.values
        n_outputs = values.shape[2]
        if n_seen < n_outputs:
            turn = n_seen * (first + np.arange(rows.n_samples))[:, None, None]
            seen = (turn + np.arange(n_seen)) % n_outputs
            values = np.take_along_axis(values, seen, axis=2) * np.sqrt(n_outputs / n_seen)
        values = values.reshape(rows.n_samples, -1, rows.n_tokens, n_seen)
        patterns = self.patterns.reshape(rows.n_samples, rows.n_queries, -1, rows.n_tokens)
        patterns = patterns.transpose(0, 2, 1, 3)
        spread = values[:, :, None] - (patterns @ values)[:, :, :, None]
        spread *= patterns[..., None]
        # C: (n, heads, queries, d, outputs) -> (heads * d, everything else)
        stacked = (rows.keys[:, None, None] @ spread).transpose(1, 3, 0, 2, 4)
        stacked = stacked.reshape(values.shape[1] * rows.n_features, -1)
        # Averaging adds a sample's rows before squaring; their cross terms cancel on average
        # and the queries' own share is what remains.
        return stacked @ stacked.T


def normal_product(shares: list[Share], direction: Array) -> Array:
    """Return ``J^T J`` times a direction, ``J v = -(I - Z Z^T) (dD[v] W)``."""
    changes = in_parts(lambda share: share.forward(direction), shares)
    inner = changes[0][1]
    for _, other in changes[1:]:
        inner = inner + other

    def backward(pair: tuple[Share, tuple[Array, Array]]) -> Array:
        share, (change, _) = pair
        change -= share.basis @ inner
        return share.gradient(change)

    product: Array = sum_in_parts(backward, list(zip(shares, changes, strict=True)))
    return product
