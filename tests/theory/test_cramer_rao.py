"""With noise the estimate is as good as any unbiased one can be, and its error bars are honest.

``pytest -m slow tests/theory/test_cramer_rao.py`` (half a minute).
"""

import numpy as np
import pytest

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.metrics import match_heads

NOISE, N_SAMPLES, N_SEEDS = 0.1, 20_000, 20


def errors_and_bars(m, k, d, seed):
    """The errors of all parameters and their standard errors, as long vectors."""
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=2.0, random_state=seed)
    X, y = sampler.sample(N_SAMPLES, as_tokens=True)
    y = y + NOISE * sampler.label_std_ * np.random.default_rng(seed).standard_normal(y.shape)
    learner = MultiHeadAttentionLearner(random_state=seed).fit(X, y)
    layer, order = sampler.layer_, match_heads(sampler.layer_, learner.layer_)
    errors = [
        learner.attention_matrices_[order] - layer.attention,
        learner.projection_matrices_[order] - layer.projection,
        learner.key_bias_[order] - layer.key_bias,
        learner.intercept_ - layer.intercept,
    ]
    bars = [
        learner.attention_std_errors_[order],
        learner.projection_std_errors_[order],
        learner.key_bias_std_errors_[order],
        learner.intercept_std_errors_,
    ]
    return tuple(np.concatenate([part.ravel() for part in parts]) for parts in (errors, bars))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2, 4, 8), (3, 4, 10)], ids=str)
def test_errors_meet_the_bound_and_intervals_cover(size):
    found = [errors_and_bars(*size, seed) for seed in range(N_SEEDS)]
    errors, bars = (np.array([pair[part] for pair in found]) for part in (0, 1))
    assert np.sqrt(np.mean(errors**2) / np.mean(bars**2)) <= 1.05
    assert 0.93 <= np.mean(np.abs(errors) < 1.96 * bars) <= 0.97
    # The case that must fail: intervals half or twice as long.
    assert np.mean(np.abs(errors) < 0.98 * bars) < 0.93
    assert np.mean(np.abs(errors) < 3.92 * bars) > 0.97
