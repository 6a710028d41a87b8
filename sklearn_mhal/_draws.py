"""Random layers and random tokens, drawn from a numpy Generator.

Layers: one function a structure, ``(rng, m, d, d_out, s) -> (attention, projection)``, listed in
``STRUCTURES``. Tokens: one function a distribution, ``(rng, (n, k, d)) -> tokens``, listed in
``TOKEN_DISTRIBUTIONS``. Every token function takes the same number of random words for
each sample, in order, and keeps nothing back, so that drawing 5 samples and 5 more is drawing 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ._forward import Array

LayerDraw = Callable[[np.random.Generator, int, int, int, float], tuple[Array, Array]]
TokenDraw = Callable[[np.random.Generator, tuple[int, int, int]], Array]

#: Correlation of neighbouring features under "correlated_gaussian".
NEIGHBOUR_CORRELATION = 0.5
#: Probability of +1 under "biased_bits".
BIASED_PROBABILITY = 0.7


def _with_norms(matrices: Array, norms: float | Array) -> Array:
    """Rescale each matrix of a stack to its Frobenius norm."""
    current = np.linalg.norm(matrices, axis=(1, 2))
    return matrices * (norms / current)[:, None, None]


def _incoherent(rng: np.random.Generator, m: int, d: int, d_out: int, scale: float) -> tuple[Array, Array]:
    attention = _with_norms(rng.standard_normal((m, d, d)), scale)
    return attention, rng.standard_normal((m, d, d_out)) / np.sqrt(d)


def _low_rank(rng: np.random.Generator, m: int, d: int, d_out: int, scale: float) -> tuple[Array, Array]:
    rank = max(1, d // 4)
    queries, keys, values = rng.standard_normal((3, m, d, rank))
    outputs = rng.standard_normal((m, rank, d_out)) / np.sqrt(rank * d)
    return _with_norms(queries @ keys.transpose(0, 2, 1), scale), values @ outputs


def _correlated(rng: np.random.Generator, m: int, d: int, d_out: int, scale: float) -> tuple[Array, Array]:
    common, own = rng.standard_normal((d, d)), rng.standard_normal((m, d, d))
    common_out, own_out = rng.standard_normal((d, d_out)), rng.standard_normal((m, d, d_out))
    return _with_norms(common + own, scale), (common_out + own_out) / np.sqrt(2 * d)


def _multiscale(rng: np.random.Generator, m: int, d: int, d_out: int, scale: float) -> tuple[Array, Array]:
    attention, projection = _incoherent(rng, m, d, d_out, scale)
    attention = _with_norms(attention, scale * np.geomspace(1, 1 / 4, m))
    return attention, projection * np.geomspace(1, 1 / 8, m)[:, None, None]


def _parity(rng: np.random.Generator, m: int, d: int, d_out: int, scale: float) -> tuple[Array, Array]:
    subset = rng.choice(np.arange(1, d), size=m, replace=False)
    direction = rng.standard_normal(d_out)
    direction /= np.linalg.norm(direction)
    attention, projection = np.zeros((m, d, d)), np.zeros((m, d, d_out))
    attention[:, subset, 0] = scale
    attention[:, 0, 0] = scale * np.arange(-m + 1, m, 2)
    signs = (-1.0) ** np.arange(1, m + 1)
    projection[:, 0] = signs[:, None] * direction
    return attention, projection


STRUCTURES: Mapping[str, LayerDraw] = {
    "incoherent": _incoherent,
    "low_rank": _low_rank,
    "correlated": _correlated,
    "multiscale": _multiscale,
    "parity": _parity,
}


def _bits(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    """Fair bits, int8. Whole 64-bit words a sample: numpy's small integers discard half-used words."""
    n_bits = shape[1] * shape[2]
    words = rng.integers(0, 2**64, size=(shape[0], -(-n_bits // 64)), dtype=np.uint64)
    octets = words.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n_bits).reshape(shape).view(np.int8)


def _signs(bits: Array) -> Array:
    """Turn 0/1 bytes into -1/+1, overwriting them."""
    signs = bits.view(np.int8)
    signs *= 2
    signs -= 1
    return signs


def _boolean(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    return _signs(_bits(rng, shape))


def _biased_bits(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    return _signs(rng.random(shape) < BIASED_PROBABILITY)


def _gaussian(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    return rng.standard_normal(shape)


def _correlated_gaussian(rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    tokens = rng.standard_normal(shape)
    tokens[..., 1:] *= np.sqrt(1 - NEIGHBOUR_CORRELATION**2)
    for feature in range(1, shape[2]):
        tokens[..., feature] += NEIGHBOUR_CORRELATION * tokens[..., feature - 1]
    return tokens


TOKEN_DISTRIBUTIONS: Mapping[str, TokenDraw] = {
    "boolean": _boolean,
    "gaussian": _gaussian,
    "correlated_gaussian": _correlated_gaussian,
    "biased_bits": _biased_bits,
    "zero_one": _bits,
}


def _distinct_boolean(rng: np.random.Generator, n_distinct: int, d: int) -> Array:
    """Return the first `n_distinct` different tokens of a Boolean stream."""
    seen = np.empty((0, d), dtype=np.int8)
    while True:
        seen = np.concatenate([seen, _boolean(rng, (n_distinct, 1, d))[:, 0]])
        first = np.unique(seen, axis=0, return_index=True)[1]
        if len(first) >= n_distinct:
            return seen[np.sort(first)[:n_distinct]]


def _from_vocabulary(vocabulary: Array, rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    words = (rng.random(shape[:2]) * len(vocabulary)).astype(np.intp)
    drawn: Array = vocabulary[words]
    return drawn


def repeated_tokens(rng: np.random.Generator, d: int) -> TokenDraw:
    """Fix a vocabulary of ``min(4 d, 2^d)`` Boolean tokens; return the draw from it."""
    return partial(_from_vocabulary, _distinct_boolean(rng, min(4 * d, 2**d), d))
