"""A bank of teachers: layers with a known truth, over every structure and size that we claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler
from sklearn_mhal._examples import Examples, make_examples


@dataclass(frozen=True)
class Teacher:
    """One layer to learn, and how many examples of it are given."""

    m: int
    k: int
    d: int
    d_out: int
    s: float
    structure: str = "incoherent"
    affine: bool = False
    multiple: int = 10
    """Samples, in units of the information limit; at least 300, at most 20,000."""

    def __str__(self) -> str:
        tail = "-affine" if self.affine else ""
        return f"{self.structure}-m{self.m}-k{self.k}-d{self.d}-o{self.d_out}-s{self.s:g}{tail}"

    @property
    def information_limit(self) -> int:
        """The least number of samples whose equations outnumber the unknowns."""
        width = self.d + int(self.affine)
        unknowns = self.m * self.d * (width + self.d_out) + int(self.affine) * self.d_out
        return -(-unknowns // (self.k * self.d_out))

    @property
    def n_samples(self) -> int:
        """How many samples are given."""
        return min(20_000, max(300, self.multiple * self.information_limit))

    def draw(self, seed: int, *, n_samples: int | None = None) -> tuple[Any, Any, AttentionLayer]:
        """Return 3-D tokens, 3-D labels and the truth."""
        sampler = BooleanAttentionSampler(
            self.m,
            self.k,
            self.d,
            n_outputs=self.d_out,
            attention_scale=self.s,
            structure=self.structure,
            key_bias_scale=0.5 if self.affine else 0.0,
            intercept_scale=1.0 if self.affine else 0.0,
            random_state=seed,
        )
        X, y = sampler.sample(n_samples or self.n_samples, as_tokens=True)
        return X, y, sampler.layer_


TEACHERS = [
    Teacher(1, 2, 4, 4, 0.5),
    Teacher(1, 4, 8, 8, 2),
    Teacher(1, 8, 16, 4, 16, affine=True),
    Teacher(1, 3, 6, 1, 4),
    Teacher(2, 2, 6, 6, 1),
    Teacher(2, 3, 8, 8, 4),
    Teacher(2, 4, 10, 10, 2),
    Teacher(2, 4, 10, 10, 0.5, affine=True),
    Teacher(2, 3, 8, 8, 16, multiple=60),
    Teacher(2, 5, 12, 3, 2),
    Teacher(3, 2, 5, 7, 2),
    Teacher(3, 3, 10, 10, 1),
    Teacher(3, 6, 12, 12, 4, affine=True),
    Teacher(3, 8, 8, 4, 8),
    Teacher(4, 3, 6, 6, 1),
    Teacher(4, 4, 16, 16, 2),
    Teacher(4, 4, 16, 16, 8),
    Teacher(4, 4, 16, 16, 16, multiple=40),
    Teacher(5, 4, 10, 6, 4),
    Teacher(5, 3, 8, 12, 2, affine=True),
    Teacher(6, 4, 8, 8, 8),
    Teacher(6, 6, 12, 12, 2),
    Teacher(2, 4, 12, 12, 4, "low_rank"),
    Teacher(3, 3, 8, 8, 2, "low_rank", affine=True),
    Teacher(4, 4, 12, 12, 4, "low_rank"),
    Teacher(6, 5, 16, 8, 1, "low_rank"),
    Teacher(2, 4, 8, 8, 2, "correlated"),
    Teacher(3, 4, 10, 5, 1, "correlated", affine=True),
    Teacher(4, 6, 8, 8, 4, "correlated"),
    Teacher(6, 3, 6, 6, 2, "correlated"),
    Teacher(2, 4, 8, 8, 4, "multiscale"),
    Teacher(3, 2, 6, 6, 2, "multiscale", affine=True),
    Teacher(4, 4, 12, 12, 4, "multiscale"),
    Teacher(6, 4, 10, 10, 8, "multiscale"),
]
"""Thirty-four teachers: m = 1..6, k = 2..8, d = 4..16, d_out = d and not, s = 0.5..16."""


def draw_examples(
    m: int,
    k: int,
    d: int,
    s: float,
    n: int,
    seed: int,
    *,
    fit_intercept: bool = False,
    **sampler: Any,
) -> tuple[Examples, AttentionLayer]:
    """Return examples of an incoherent layer, as the stages take them, and the layer."""
    source = BooleanAttentionSampler(m, k, d, attention_scale=s, random_state=seed, **sampler)
    X, y = source.sample(n, as_tokens=True)
    return make_examples(X, y, fit_intercept=fit_intercept, random_state=seed), source.layer_


def head_vectors(examples: Examples, layer: AttentionLayer) -> Any:
    """Return the true heads as the convex body sees them: (m, D), internal units."""
    stacked = examples.units.attention_in(layer.attention, layer.key_bias)
    heads = stacked.reshape(len(stacked), layer.n_heads, -1).transpose(1, 0, 2)
    return heads.reshape(layer.n_heads, -1)


def relative_error(estimate: Any, truth: Any) -> float:
    """Return the Frobenius error relative to the truth."""
    return float(np.linalg.norm(estimate - truth) / np.linalg.norm(truth))


def cosine(first: Any, second: Any) -> float:
    """Return the cosine of the angle between two arrays."""
    return float(np.vdot(first, second) / (np.linalg.norm(first) * np.linalg.norm(second)))
