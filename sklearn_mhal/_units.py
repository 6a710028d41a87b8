"""Between the units of the data and the white units in which the stages work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._forward import Array, stack_attention, unstack_attention
from .layer import AttentionLayer


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """The change of units ``z = (x - shift) T``, ``y' = (y - label_shift) / label_scale``.

    The affine attention map is closed under it: the scores ``(z_a, 1)^T [Theta; u] z_b`` equal,
    up to terms the softmax cancels, ``x_a^T (T Theta T^T) x_b + (T u - (T Theta T^T)^T shift)^T x_b``.
    Without intercept `shift` is zero and the map is closed as well.
    """

    fit_intercept: bool
    shift: Array
    whitener: Array | None
    """``T`` of shape (d, rank); None for the identity (and then `shift` is zero)."""
    label_shift: Array
    label_scale: float

    @property
    def n_features(self) -> int:
        """``d``."""
        return len(self.shift)

    @property
    def width(self) -> int:
        """Width of white tokens: ``d`` less the directions in which no token varies."""
        return self.n_features if self.whitener is None else int(self.whitener.shape[1])

    def tokens_in(self, tokens: Array) -> Array:
        """Return tokens in white units, float64, in memory of their own."""
        tokens = tokens.astype(np.float64, order="C")
        if self.whitener is None:
            return tokens
        tokens -= self.shift
        return tokens @ self.whitener

    def labels_in(self, labels: Array) -> Array:
        """Return labels in internal units, in memory of their own."""
        labels = labels.astype(np.float64, order="C")
        if self.fit_intercept:
            labels -= self.label_shift
        labels /= self.label_scale
        return labels

    def attention_in(self, attention: Array, key_bias: Array | None = None) -> Array:
        """Return stacked internal attention for ``(m, d, d)`` matrices and ``(m, d)`` biases of the data."""
        bias = np.zeros(attention.shape[:2]) if key_bias is None else key_bias
        if self.whitener is not None:
            back = np.linalg.pinv(self.whitener)
            bias = (bias + np.einsum("mij,i->mj", attention, self.shift)) @ back.T
            attention = back @ attention @ back.T
        return stack_attention(attention, bias if self.fit_intercept else None)

    def attention_out(self, stacked: Array) -> tuple[Array, Array]:
        """Return ``(m, d, d)`` matrices and ``(m, d)`` key biases in the units of the data."""
        attention, bias = unstack_attention(stacked, self.width)
        if self.whitener is not None:
            attention = self.whitener @ attention @ self.whitener.T
            bias = bias @ self.whitener.T - np.einsum("mij,i->mj", attention, self.shift)
        return attention, bias

    def sum_out(self, total: Array) -> Array:
        """Return a sum of projections (an intercept row may follow) in the units of the data."""
        total = total[: self.width] * self.label_scale
        return total if self.whitener is None else self.whitener @ total

    def change(self, attention: Array, projection: Array) -> tuple[Array, Array, Array, Array]:
        """Return a change of parameters in the units of the data: the linear part of :meth:`layer`.

        `projection` has the intercept as last row if one is fitted.
        """
        theta, bias = self.attention_out(attention)
        n_heads = len(theta)
        heads = projection[: n_heads * self.width].reshape(n_heads, self.width, -1)
        heads = heads * self.label_scale
        if self.whitener is not None:
            heads = self.whitener @ heads
        if not self.fit_intercept:
            return theta, heads, bias, np.zeros(heads.shape[2])
        return theta, heads, bias, projection[-1] * self.label_scale - self.shift @ heads.sum(axis=0)

    def layer(self, attention: Array, projection: Array, intercept: Array) -> AttentionLayer:
        """Return the layer in the units of the data for stacked internal parameters."""
        theta, bias = self.attention_out(attention)
        heads = projection.reshape(len(theta), self.width, -1) * self.label_scale
        if self.whitener is not None:
            heads = self.whitener @ heads
        if not self.fit_intercept:
            return AttentionLayer(theta, heads)
        offset = intercept * self.label_scale + self.label_shift - self.shift @ heads.sum(axis=0)
        return AttentionLayer(theta, heads, key_bias=bias, intercept=offset)
