"""Standard errors: their shapes, their scaling, and that they mean what they say."""

import numpy as np
import pytest

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.metrics import match_heads

M, K, D = 2, 4, 6


def noisy(n=4000, noise=0.1, seed=0):
    sampler = BooleanAttentionSampler(M, K, D, attention_scale=2.0, random_state=seed)
    X, y = sampler.sample(n, as_tokens=True)
    std = noise * sampler.label_std_
    return X, y + std * np.random.default_rng(seed).standard_normal(y.shape), sampler.layer_, std


def fit(X, y, **settings):
    return MultiHeadAttentionLearner(M, random_state=0, **settings).fit(X, y)


@pytest.fixture(scope="module")
def fitted():
    X, y, layer, std = noisy()
    return fit(X, y), layer, std


def test_shapes(fitted):
    learner, _, _ = fitted
    for name in ("attention", "projection"):
        assert getattr(learner, f"{name}_std_errors_").shape == getattr(learner, f"{name}_matrices_").shape
    assert learner.key_bias_std_errors_.shape == (M, D) and learner.intercept_std_errors_.shape == (D,)
    assert np.all(learner.attention_std_errors_ > 0) and np.all(learner.intercept_std_errors_ > 0)


def test_noise_is_measured(fitted):
    learner, _, std = fitted
    # 96,000 labels give the deviation to 0.25 %.
    assert learner.noise_std_ == pytest.approx(std, rel=0.01)


def test_errors_are_as_large_as_they_are_said_to_be(fitted):
    learner, layer, _ = fitted
    order = match_heads(layer, learner.layer_)
    pairs = [
        (learner.attention_matrices_, layer.attention, learner.attention_std_errors_),
        (learner.projection_matrices_, layer.projection, learner.projection_std_errors_),
        (learner.key_bias_, layer.key_bias, learner.key_bias_std_errors_),
    ]
    scores = np.concatenate([((found[order] - true) / std[order]).ravel() for found, true, std in pairs])
    # 156 correlated scores of unit variance: their mean square is 1 within some 15 %.
    assert np.mean(scores**2) == pytest.approx(1.0, abs=0.45)
    # The case that must fail: half the standard errors would be four times off.
    assert np.mean((2 * scores) ** 2) > 1.45


def test_four_times_the_samples_halve_them(fitted):
    few, _, _ = fitted
    X, y, _, _ = noisy(n=16_000)
    many = fit(X, y)
    ratio = few.attention_std_errors_.mean() / many.attention_std_errors_.mean()
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_weights_count_as_repetitions(fitted):
    learner, _, _ = fitted
    X, y, _, _ = noisy()
    twice = fit(X, y, alpha=0.0).fit(X, y, sample_weight=np.full(len(X), 2.0))
    np.testing.assert_allclose(
        twice.projection_std_errors_, learner.projection_std_errors_ / np.sqrt(2), rtol=0.01
    )


def test_without_noise_they_are_zero():
    sampler = BooleanAttentionSampler(M, K, D, random_state=0)
    learner = fit(*sampler.sample(400, as_tokens=True))
    assert learner.noise_std_ == pytest.approx(0.0, abs=1e-10)
    assert not learner.attention_std_errors_.any() and not learner.intercept_std_errors_.any()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_free_direction_has_none():
    """A head that is asked for and stays zero determines no attention."""
    X, y, _, _ = noisy()
    learner = MultiHeadAttentionLearner(M + 2, random_state=0).fit(X, y)
    assert not learner.projection_matrices_[-1].any()
    assert learner.attention_std_errors_ is None and learner.projection_std_errors_ is None
