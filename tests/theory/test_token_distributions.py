"""Beyond Boolean: six distributions of tokens, default settings, no noise.

The stages take tokens that are white, so they are whitened and centred first. What a distribution cannot give
(few distinct tokens) the polish has to make up for.

More seeds: ``pytest -m slow tests/theory/test_token_distributions.py``.
"""

import numpy as np
import pytest

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

K, D, N = 4, 8, 1500


def gaussian(rng):
    return rng.standard_normal((N, K, D))


def correlated(rng):
    mixing = np.eye(D) + 0.5 * rng.standard_normal((D, D)) / np.sqrt(D)
    return rng.standard_normal((N, K, D)) @ mixing


def shifted(rng):
    return rng.standard_normal((N, K, D)) + rng.uniform(0.5, 1.5, D)


def biased_bits(rng):
    return np.where(rng.random((N, K, D)) < 0.8, 1.0, -1.0)


def zero_one_bits(rng):
    return rng.integers(0, 2, (N, K, D)).astype(np.int8)


def few_distinct(rng):
    vocabulary = rng.standard_normal((40, D))
    return vocabulary[rng.integers(0, 40, (N, K))]


DISTRIBUTIONS = [gaussian, correlated, shifted, biased_bits, zero_one_bits, few_distinct]


def check(draw, m, seed):
    layer = BooleanAttentionSampler(m, K, D, attention_scale=1.5, random_state=10 * seed + m).layer_
    X = draw(np.random.default_rng(10 * seed + m))
    learner = MultiHeadAttentionLearner(random_state=seed).fit(X, layer.predict(X))
    assert learner.n_heads_ == m, learner.stages_["heads"].message
    assert head_recovery_error(layer, learner.layer_) <= 1e-8
    assert learner.certificate_.identified, learner.certificate_.verdict


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_recovery(draw, m):
    check(draw, m, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_recovery_with_other_seeds(draw, m, seed):
    check(draw, m, seed)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_too_few_distinct_tokens_determine_nothing():
    """The case that must fail: fewer distinct tokens than features leave directions free."""
    layer = BooleanAttentionSampler(2, K, D, attention_scale=1.5, random_state=0).layer_
    rng = np.random.default_rng(0)
    X = rng.standard_normal((D - 2, D))[rng.integers(0, D - 2, (N, K))]
    learner = MultiHeadAttentionLearner(2, random_state=0).fit(X, layer.predict(X))
    assert head_recovery_error(layer, learner.layer_) > 0.01
    assert not learner.certificate_.identified
