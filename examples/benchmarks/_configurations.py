"""Layers to learn, with their samples: what every benchmark is run on."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Configuration:
    """A family of layers, the size of a sample and how many there are."""

    name: str
    n_heads: int
    n_tokens: int
    n_features: int
    attention_scale: float
    n_samples: int
    structure: str = "incoherent"

    def sampler(self, seed: int) -> BooleanAttentionSampler:
        """Return a sampler whose layer is drawn, or loaded, already."""
        if self.structure == "real":
            layer = real_layer(self.n_features)
            return BooleanAttentionSampler(n_tokens=self.n_tokens, layer=layer, random_state=seed)
        return BooleanAttentionSampler(
            self.n_heads,
            self.n_tokens,
            self.n_features,
            attention_scale=self.attention_scale,
            structure=self.structure,
            random_state=seed,
        )

    def draw(self, seed: int) -> tuple[Array, Array, AttentionLayer]:
        """Return tokens, labels and the true layer."""
        sampler = self.sampler(seed)
        X, y = sampler.sample(self.n_samples, as_tokens=True)
        return X, y, sampler.layer_


def _generic(m: int, k: int, d: int, s: float, n: int, structure: str = "incoherent") -> Configuration:
    prefix = "" if structure == "incoherent" else f"{structure} "
    return Configuration(f"{prefix}({m},{k},{d},{s:g})", m, k, d, s, n, structure)


def _real(width: int) -> Configuration:
    return Configuration(f"real heads d'={width}", 12, 8, width, float("nan"), 4000, "real")


CONFIGURATIONS = (
    _generic(1, 4, 16, 2, 2000),
    _generic(2, 4, 10, 2, 2000),
    _generic(3, 6, 12, 4, 4000),
    _generic(4, 4, 16, 2, 2000),
    _generic(4, 4, 16, 8, 20_000),
    _generic(4, 4, 16, 16, 20_000),
    _generic(8, 4, 8, 8, 20_000),
    _generic(8, 8, 32, 4, 4000),
    _generic(4, 4, 12, 4, 4000, "low_rank"),
    _generic(4, 4, 12, 4, 4000, "multiscale"),
    _real(16),
    _real(32),
)


def chosen(names: list[str] | None) -> list[Configuration]:
    """Return the configurations of the given names, or of the given numbers in the list; None is all."""
    if not names:
        return list(CONFIGURATIONS)
    by_name = {configuration.name: configuration for configuration in CONFIGURATIONS}
    by_name |= {str(index): configuration for index, configuration in enumerate(CONFIGURATIONS)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        listed = "\n".join(f"  {index}  {item.name}" for index, item in enumerate(CONFIGURATIONS))
        raise SystemExit(f"No configuration {', '.join(unknown)}. There are:\n{listed}")
    return [by_name[name] for name in names]


@cache
def real_layer(n_features: int) -> AttentionLayer:
    """Return the pretrained layer of ``examples/recover_minilm_heads.py``, biases and 64 outputs."""
    path = Path(__file__).resolve().parents[1] / "recover_minilm_heads.py"
    spec = importlib.util.spec_from_file_location("recover_minilm_heads", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    layer: AttentionLayer = example.reduced_layer(*example.load_layer(0), n_features, 64)
    return layer
