"""Layers from and to PyTorch, which need not be installed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, head_recovery_error

# What is promised, relative to the largest output: single precision has seven digits.
AGREEMENT = 1e-6


def test_missing_torch_is_named_with_its_extra(monkeypatch):
    layer = AttentionLayer(np.zeros((1, 2, 2)), np.eye(2)[None])
    monkeypatch.delitem(sys.modules, "sklearn_mhal._torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"to_torch needs PyTorch.*sklearn-mhal\[bench\]"):
        layer.to_torch()
    with pytest.raises(ImportError, match=r"from_torch needs PyTorch.*sklearn-mhal\[bench\]"):
        AttentionLayer.from_torch(None)


def test_importing_does_not_import_torch():
    code = "import sys, sklearn_mhal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def random_layer(m, d, d_out, *, rank=None, affine=True, seed=0):
    rng = np.random.default_rng(seed)
    rank = d if rank is None else rank
    left, right = rng.standard_normal((2, m, d, rank)) / np.sqrt(d)
    into, out = rng.standard_normal((m, d, rank)), rng.standard_normal((m, rank, d_out)) / np.sqrt(rank)
    bias = np.einsum("mdr,mr->md", right, rng.standard_normal((m, rank))) if affine else None
    intercept = rng.standard_normal(d_out) if affine else None
    return AttentionLayer(left @ right.transpose(0, 2, 1), into @ out, key_bias=bias, intercept=intercept)


def tokens(n, k, d):
    return np.random.default_rng(1).standard_normal((n, k, d)).astype(np.float32)


def assert_agree(torch, module, layer, X, *, batch_first=True):
    given = torch.from_numpy(X)
    with torch.no_grad():
        if isinstance(module, torch.nn.MultiheadAttention):
            given = given if batch_first else given.transpose(0, 1)
            outputs = module.eval()(given, given, given, need_weights=False)[0]
            outputs = outputs if batch_first else outputs.transpose(0, 1)
        else:
            outputs = module(given)
    expected = layer.predict(X)
    assert outputs.dtype == torch.float32
    assert np.abs(outputs.numpy() - expected).max() <= AGREEMENT * np.abs(expected).max()


def multihead(torch, d, m, *, seed=0, **settings):
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(d, m, **settings)
    # Torch starts all biases at zero, which would hide them.
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return module


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("d, m", [(8, 1), (12, 3), (16, 4)])
def test_reads_multihead_attention(torch, d, m, bias, batch_first):
    module = multihead(torch, d, m, bias=bias, batch_first=batch_first)
    layer = AttentionLayer.from_torch(module)
    assert (layer.n_heads, layer.n_features, layer.n_outputs) == (m, d, d)
    assert bool(np.any(layer.intercept)) == bool(np.any(layer.key_bias)) == bias
    assert_agree(torch, module, layer, tokens(20, 5, d), batch_first=batch_first)


def test_reads_attention_weights_too(torch):
    module = multihead(torch, 12, 3, batch_first=True)
    X = tokens(10, 4, 12)
    given = torch.from_numpy(X)
    with torch.no_grad():
        _, weights = module(given, given, given, average_attn_weights=False)
    found = AttentionLayer.from_torch(module).attention_weights(X)
    np.testing.assert_allclose(found, weights.numpy(), atol=AGREEMENT)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(kdim=4), "kdim=4 and vdim=8 must be embed_dim=8"),
        (dict(vdim=6), "kdim=8 and vdim=6 must be embed_dim=8"),
        (dict(add_bias_kv=True), "add a token that is no input"),
        (dict(add_zero_attn=True), "add a token that is no input"),
    ],
)
def test_what_is_not_self_attention_is_refused(torch, settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayer.from_torch(torch.nn.MultiheadAttention(8, 2, **settings))


def test_other_modules_are_refused(torch):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.MultiheadAttention, got Linear"):
        AttentionLayer.from_torch(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("m, d, d_out, affine", [(1, 3, 2, False), (3, 5, 4, True), (2, 6, 6, True)])
def test_merged(torch, m, d, d_out, affine):
    layer = random_layer(m, d, d_out, affine=affine)
    module = layer.to_torch()
    assert_agree(torch, module, layer, tokens(20, 4, d))
    # Float32 rounds every parameter once.
    assert head_recovery_error(layer, AttentionLayer.from_torch(module)) < 1e-6
    exact = layer.to_torch(dtype=torch.float64)
    assert head_recovery_error(layer, AttentionLayer.from_torch(exact)) == 0.0
    assert f"n_heads={m}, n_features={d}, n_outputs={d_out}" in repr(module)


def test_merged_can_be_trained_copied_and_pickled(torch):
    layer = random_layer(2, 4, 3)
    module = layer.to_torch(dtype=torch.float64)
    X = torch.from_numpy(tokens(5, 3, 4)).double()
    (module(X) ** 2).sum().backward()
    gradient = layer.gradient_product(X.numpy(), 2 * layer.predict(X.numpy()))
    # The same derivative by two ways, to rounding.
    np.testing.assert_allclose(module.attention.grad.numpy(), gradient.attention, atol=1e-12)
    np.testing.assert_allclose(module.key_bias.grad.numpy(), gradient.key_bias, atol=1e-12)
    assert len(list(module.parameters())) == 4
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            np.testing.assert_array_equal(other(X).numpy(), module(X).numpy())


@pytest.mark.parametrize("m, d, affine", [(1, 4, True), (2, 8, True), (4, 12, False)])
def test_multihead(torch, m, d, affine):
    # Scores with a bias have one row more, and the bias must fit into the head as well.
    layer = random_layer(m, d, d, rank=d // m, affine=affine)
    module = layer.to_torch(form="multihead")
    assert isinstance(module, torch.nn.MultiheadAttention) and module.batch_first
    assert (module.embed_dim, module.num_heads) == (d, m)
    assert_agree(torch, module, layer, tokens(20, 5, d))


@pytest.mark.parametrize(
    "layer, message",
    [
        (dict(m=2, d=4, d_out=3), "4 features and 3 outputs. Use form='merged'"),
        (dict(m=3, d=4, d_out=4), "3 heads do not divide 4 features"),
        (
            dict(m=2, d=4, d_out=4),
            "attention matrix with its key bias of head 0 has a rank above the head size 2",
        ),
    ],
)
def test_layers_that_no_multihead_attention_holds(torch, layer, message):
    with pytest.raises(ValueError, match=message):
        random_layer(**layer).to_torch(form="multihead")


def test_unknown_form():
    with pytest.raises(ValueError, match="form must be 'merged' or 'multihead', got 'onnx'"):
        random_layer(1, 2, 2).to_torch(form="onnx")


def test_a_zero_layer(torch):
    layer = AttentionLayer(np.zeros((2, 4, 4)), np.zeros((2, 4, 4)))
    for form in ("merged", "multihead"):
        assert head_recovery_error(layer, AttentionLayer.from_torch(layer.to_torch(form=form))) == 0.0


def test_a_learned_layer_goes_back_into_the_model(torch):
    """Read a module off its examples, put what was learned in its place, and nothing changes."""
    module = multihead(torch, 6, 2, batch_first=True).double()
    X = np.random.default_rng(0).choice([-1.0, 1.0], size=(600, 4, 6))
    given = torch.from_numpy(X)
    with torch.no_grad():
        labels = module(given, given, given, need_weights=False)[0].numpy()
    learner = MultiHeadAttentionLearner(random_state=0).fit(X, labels)
    assert head_recovery_error(AttentionLayer.from_torch(module), learner.layer_) < 1e-9
    back = learner.layer_.to_torch(form="multihead", dtype=torch.float64)
    with torch.no_grad():
        again = back(given, given, given, need_weights=False)[0].numpy()
    # What was learned to ten digits.
    np.testing.assert_allclose(again, labels, atol=1e-9)
