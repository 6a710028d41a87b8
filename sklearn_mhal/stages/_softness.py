"""Samples that carry information on the attention: those whose patterns are soft."""

from __future__ import annotations

import numpy as np

from .._examples import Examples
from .._forward import Array, TokenRows


def soft_samples(examples: Examples, attention: Array, n_chosen: int) -> Examples:
    """Return the samples whose patterns are softest, in the mean over queries and heads.

    The derivative of a pattern p in its logits is ``diag(p) - p p^T``, of trace ``1 - |p|^2``: a
    saturated pattern carries no information on the attention, and under hard attention most
    patterns are saturated.
    """
    if examples.n_samples <= n_chosen:
        return examples
    softness = np.empty(examples.n_samples)
    n_heads = attention.shape[1] // examples.n_features
    size = max(1, examples.n_samples // max(1, examples.n_samples // 512))
    for start in range(0, examples.n_samples, size):
        part = examples.between(start, start + size)
        rows = TokenRows(part.white_tokens(), affine=examples.fit_intercept, readout=examples.readout)
        patterns = rows.patterns(attention)
        softness[start : start + size] = 1.0 - np.einsum("nab,nab->n", patterns, patterns) / (
            rows.n_queries * n_heads
        )
    return examples.pick(np.sort(np.argsort(-softness, kind="stable")[:n_chosen]))
