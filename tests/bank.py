"""A bank of teachers: layers with a known truth, over every structure and size that we claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler


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
    def n_samples(self) -> int:
        width = self.d + int(self.affine)
        unknowns = self.m * self.d * (width + self.d_out) + int(self.affine) * self.d_out
        limit = -(-unknowns // (self.k * self.d_out))
        return min(20_000, max(300, self.multiple * limit))

    def draw(self, seed: int) -> tuple[Any, Any, AttentionLayer]:
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
        X, y = sampler.sample(self.n_samples, as_tokens=True)
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
