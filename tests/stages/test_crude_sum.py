"""The regression of the mean label on the mean token."""

import numpy as np
import pytest
from bank import draw_examples, relative_error
from sklearn import config_context

from sklearn_mhal import AttentionLayer
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import estimate_crude_sum

N, K, D, D_OUT = 300, 3, 4, 5


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_is_a_regression(rng, affine, weighted):
    tokens, labels = rng.standard_normal((N, K, D)), rng.standard_normal((N, K, D_OUT))
    weights = rng.uniform(0.5, 2.0, N) if weighted else np.ones(N)
    examples = make_examples(
        tokens, labels, fit_intercept=affine, sample_weight=weights if weighted else None
    )
    crude = estimate_crude_sum(examples)
    design = np.column_stack([tokens.mean(axis=1), np.ones((N, int(affine)))])
    root = np.sqrt(weights)[:, None]
    expected = np.linalg.lstsq(root * design, root * labels.mean(axis=1), rcond=None)[0]
    np.testing.assert_allclose(crude.total, expected[:D], atol=1e-10)
    assert crude.internal.shape == (D + affine, D_OUT)
    assert crude.n_samples == N and crude.seconds > 0.0


def test_attention_zero_is_exact(rng):
    """Uniform patterns average the tokens, and the sum is then all there is."""
    tokens = rng.standard_normal((N, K, D)) @ rng.standard_normal((D, D))
    layer = AttentionLayer(np.zeros((2, D, D)), rng.standard_normal((2, D, D_OUT)))
    crude = estimate_crude_sum(make_examples(tokens, layer.predict(tokens)))
    assert relative_error(crude.total, layer.projection.sum(axis=0)) < 1e-12
    assert crude.explained == pytest.approx(1.0) and "explains 100%" in crude.message


def test_attention_makes_it_biased():
    """The case that must fail: the harder the attention, the further off."""
    errors = []
    for s in (0.5, 8.0):
        examples, layer = draw_examples(2, 4, 8, s, 20_000, 0)
        errors.append(relative_error(estimate_crude_sum(examples).total, layer.projection.sum(axis=0)))
    # Measured 0.09 and 0.37.
    assert 0.05 < errors[0] < 0.15 and 0.3 < errors[1] < 0.45


@pytest.mark.parametrize("readout", ["first", "mean"])
def test_other_readouts(readout):
    examples, layer = draw_examples(2, 4, 8, 1.0, 5000, 0)
    tokens = examples.tokens
    labels = layer.predict(tokens)
    labels = labels[:, :1] if readout == "first" else labels.mean(axis=1, keepdims=True)
    crude = estimate_crude_sum(make_examples(tokens, labels, readout=readout))
    assert relative_error(crude.total, layer.projection.sum(axis=0)) < 0.5


def test_chunks_do_not_matter():
    examples, _ = draw_examples(2, 4, 8, 1.0, 500, 0, fit_intercept=True)
    whole = estimate_crude_sum(examples)
    with config_context(working_memory=0.01):
        parts = estimate_crude_sum(examples)
    np.testing.assert_allclose(parts.internal, whole.internal, atol=1e-12)
    assert parts.explained == pytest.approx(whole.explained, rel=1e-12)


def test_zero_labels(rng):
    crude = estimate_crude_sum(make_examples(rng.standard_normal((N, K, D)), np.zeros((N, K, D_OUT))))
    assert not crude.total.any() and crude.explained == 1.0
