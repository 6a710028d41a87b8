"""Layers from and to PyTorch. Imported, with torch, by the two methods of AttentionLayer only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._forward import Array
from .layer import AttentionLayer


class AttentionModule(nn.Module):
    """An attention layer with merged matrices, as a module that can be trained further.

    Parameters
    ----------
    attention : Tensor of shape (n_heads, n_features, n_features)
    projection : Tensor of shape (n_heads, n_features, n_outputs)
    key_bias : Tensor of shape (n_heads, n_features)
    intercept : Tensor of shape (n_outputs,)
        As in :class:`~sklearn_mhal.AttentionLayer`; each becomes a parameter of the module.
    """

    def __init__(self, attention: Tensor, projection: Tensor, key_bias: Tensor, intercept: Tensor) -> None:
        super().__init__()
        self.attention = nn.Parameter(attention)
        self.projection = nn.Parameter(projection)
        self.key_bias = nn.Parameter(key_bias)
        self.intercept = nn.Parameter(intercept)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, k, d) to outputs (n, k, d_out)."""
        keys = tokens[:, None]
        scores = (keys @ self.attention + self.key_bias[:, None]) @ keys.transpose(-1, -2)
        pooled = torch.softmax(scores, dim=-1) @ keys
        return (pooled @ self.projection).sum(dim=1) + self.intercept

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        n_heads, n_features, n_outputs = self.projection.shape
        return f"n_heads={n_heads}, n_features={n_features}, n_outputs={n_outputs}"


def to_merged(layer: AttentionLayer, dtype: Any) -> AttentionModule:
    """Return the layer as a module with the same four parameters."""
    parts = (layer.attention, layer.projection, layer.key_bias, layer.intercept)
    return AttentionModule(*(_tensor(part, dtype) for part in parts))


def to_multihead(layer: AttentionLayer, dtype: Any, tolerance: float) -> nn.MultiheadAttention:
    """Return the layer as ``nn.MultiheadAttention``; see :meth:`AttentionLayer.to_torch`."""
    m, d = layer.n_heads, layer.n_features
    if layer.n_outputs != d:
        raise ValueError(
            f"nn.MultiheadAttention has as many outputs as features, and this layer has {d} features and "
            f"{layer.n_outputs} outputs. Use form='merged'."
        )
    if d % m:
        raise ValueError(f"{m} heads do not divide {d} features. Use form='merged'.")
    size = d // m
    # With the key bias as one more row the scores of a head are (q, 1)^T [Theta; u] x.
    scores = np.concatenate([layer.attention, layer.key_bias[:, None]], axis=1) * np.sqrt(size)
    queries, keys = _factorise("attention matrix with its key bias", scores, size, tolerance)
    values, outputs = _factorise("projection matrix", layer.projection, size, tolerance)
    weights = [queries[:, :d].transpose(0, 2, 1), keys, values.transpose(0, 2, 1)]
    biases = [queries[:, d], np.zeros((m, size)), np.zeros((m, size))]
    module = nn.MultiheadAttention(d, m, batch_first=True, dtype=dtype or torch.get_default_dtype())
    with torch.no_grad():
        module.in_proj_weight.copy_(_tensor(np.concatenate([w.reshape(d, d) for w in weights]), dtype))
        module.in_proj_bias.copy_(_tensor(np.concatenate([bias.ravel() for bias in biases]), dtype))
        module.out_proj.weight.copy_(_tensor(outputs.reshape(d, d).T, dtype))
        module.out_proj.bias.copy_(_tensor(layer.intercept, dtype))
    return module


def _factorise(name: str, matrices: Array, size: int, tolerance: float) -> tuple[Array, Array]:
    """Return ``left (m, rows, size)`` and ``right (m, size, columns)``, balanced, of the given product."""
    left, values, right = np.linalg.svd(matrices, full_matrices=False)
    largest = values.max(axis=1, initial=0.0)
    lost = values[:, size:].max(axis=1, initial=0.0)
    for head in np.flatnonzero(lost > tolerance * largest):
        raise ValueError(
            f"the {name} of head {head} has a rank above the head size {size}: its singular value number "
            f"{size + 1} is {lost[head] / largest[head]:.1e} of the largest, tolerance={tolerance:g}. "
            "Use form='merged'."
        )
    roots = np.sqrt(values[:, :size])
    return left[:, :, :size] * roots[:, None], roots[:, :, None] * right[:, :size]


def _tensor(array: Array, dtype: Any) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=dtype or torch.get_default_dtype())


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy())


def from_module(module: Any) -> AttentionLayer:
    """Read a module; see :meth:`AttentionLayer.from_torch`."""
    if isinstance(module, AttentionModule):
        return AttentionLayer(
            _array(module.attention),
            _array(module.projection),
            key_bias=_array(module.key_bias),
            intercept=_array(module.intercept),
        )
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}.")
    if not module._qkv_same_embed_dim:
        raise ValueError(
            f"kdim={module.kdim} and vdim={module.vdim} must be embed_dim={module.embed_dim}: in "
            "self-attention query, key and value are the same tokens."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "add_bias_kv and add_zero_attn add a token that is no input; an AttentionLayer has none."
        )
    query, key, value = (_array(weight) for weight in module.in_proj_weight.chunk(3))
    biases: dict[str, Array] = {}
    if module.in_proj_bias is not None:
        names = ("query_bias", "key_bias", "value_bias")
        parts = module.in_proj_bias.chunk(3)
        biases = {name: _array(part) for name, part in zip(names, parts, strict=True)}
    if module.out_proj.bias is not None:
        biases["output_bias"] = _array(module.out_proj.bias)
    output = _array(module.out_proj.weight)
    return AttentionLayer.from_projections(query, key, value, output, n_heads=module.num_heads, **biases)
