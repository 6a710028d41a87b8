"""With noise the estimate is as good as any unbiased one can be, and its error bars are honest.

The bound is that of the true layer on all samples; the error bars are the learner's own, from what it has
learned and a part of the samples.

The sizes that are promised, 20 seeds: ``pytest -m slow tests/theory/test_cramer_rao.py`` (two minutes).
"""

from types import SimpleNamespace

import numpy as np
import pytest

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._examples import make_examples
from sklearn_mhal._information import information
from sklearn_mhal.metrics import match_heads
from sklearn_mhal.stages.uncertainty import _variances

NOISE = 0.1


def draw(m, k, d, n, seed):
    """Return samples, the truth and the standard deviation of the noise."""
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=2.0, random_state=seed)
    X, y = sampler.sample(n, as_tokens=True)
    std = NOISE * sampler.label_std_
    return X, y + std * np.random.default_rng(seed).standard_normal(y.shape), sampler.layer_, std


def flat(*parts):
    return np.concatenate([part.ravel() for part in parts])


def bound_of(X, y, layer, std):
    """The Cramer-Rao bound, variances: the inverse information of the truth on all samples."""
    examples = make_examples(X, y, fit_intercept=True, random_state=0)
    attention = examples.units.attention_in(layer.attention, layer.key_bias)
    projection = layer.projection.reshape(attention.shape[1], -1) / examples.units.label_scale
    info = information(examples.problem(), attention, projection)
    return (
        flat(*_variances(examples.units, info, attention.shape[1])) * (std / examples.units.label_scale) ** 2
    )


def run(m, k, d, n, seed, **settings):
    """Fit once; return errors, bars and the bound as long vectors, standard deviations all."""
    X, y, layer, std = draw(m, k, d, n, seed)
    learner = MultiHeadAttentionLearner(random_state=seed, **settings).fit(X, y)
    order = match_heads(layer, learner.layer_)
    found = flat(
        learner.attention_matrices_[order],
        learner.projection_matrices_[order],
        learner.key_bias_[order],
        learner.intercept_,
    )
    bars = flat(
        learner.attention_std_errors_[order],
        learner.projection_std_errors_[order],
        learner.key_bias_std_errors_[order],
        learner.intercept_std_errors_,
    )
    truth = flat(layer.attention, layer.projection, layer.key_bias, layer.intercept)
    return SimpleNamespace(errors=found - truth, bars=bars, bound=np.sqrt(bound_of(X, y, layer, std)))


def several(m, k, d, n, seeds, **settings):
    runs = [run(m, k, d, n, seed, **settings) for seed in seeds]
    return tuple(np.array([getattr(one, name) for one in runs]) for name in ("errors", "bars", "bound"))


def rms(values):
    return np.sqrt(np.mean(values**2))


@pytest.fixture(scope="module")
def small():
    return several(2, 3, 5, 2000, range(8), n_heads=2)


class TestSmall:
    """Eight seeds of 115 parameters, some 900 scores of which perhaps every other is independent."""

    def test_errors_meet_the_bound(self, small):
        errors, _, bound = small
        # The root of 450 squares' mean scatters by 3 %: three times that. Measured 1.00.
        assert 0.9 < rms(errors) / rms(bound) < 1.1

    def test_intervals_cover(self, small):
        errors, bars, _ = small
        # A share of 95 % of 450 scatters by 1 %: three times that.
        assert 0.92 < np.mean(np.abs(errors) < 1.96 * bars) < 0.98

    def test_bars_are_the_bound(self, small):
        _, bars, bound = small
        # The learned layer in place of the true one and a part of the samples in place of all: measured 0.98
        # to 1.01.
        assert rms(bars) / rms(bound) == pytest.approx(1.0, abs=0.02)
        np.testing.assert_allclose(bars / bound, 1.0, atol=0.05)

    def test_half_the_samples_do_not_meet_the_bound_of_all(self, small):
        """The case that must fail: errors of an estimate that leaves half of the samples out."""
        _, _, bound = small
        errors, bars, _ = several(2, 3, 5, 1000, range(8), n_heads=2)
        assert rms(errors) / rms(bound) > 1.2
        # It knows: its own bars are longer, and cover.
        assert 0.92 < np.mean(np.abs(errors) < 1.96 * bars) < 0.98

    def test_bars_of_another_length_do_not_cover(self, small):
        """The case that must fail: intervals half or twice as long."""
        errors, bars, _ = small
        assert np.mean(np.abs(errors) < 0.98 * bars) < 0.75
        assert np.mean(np.abs(errors) < 3.92 * bars) > 0.995


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2, 4, 8), (3, 4, 10)], ids=str)
def test_errors_meet_the_bound_and_intervals_cover(size):
    errors, bars, bound = several(*size, 20_000, range(20))
    # Measured with the number of heads counted: 0.99 and 1.00.
    assert rms(errors) / rms(bound) <= 1.05
    assert rms(bars) / rms(bound) == pytest.approx(1.0, abs=0.02)
    assert 0.93 <= np.mean(np.abs(errors) < 1.96 * bars) <= 0.97
    # The case that must fail: intervals half or twice as long.
    assert np.mean(np.abs(errors) < 0.98 * bars) < 0.93
    assert np.mean(np.abs(errors) < 3.92 * bars) > 0.97
