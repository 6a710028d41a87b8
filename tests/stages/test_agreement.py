"""The best single pattern of every row."""

import numpy as np
import pytest
from bank import draw_examples

from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages._agreement import Rows, fit_patterns, load_rows, no_agreement

N, K, D, D_OUT = 30, 3, 4, 5


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def one_pattern_rows(rng, intercept=None):
    """Rows that share one pattern exactly, some outside the simplex, and their patterns and sum."""
    tokens = rng.standard_normal((N, K, D))
    total = rng.standard_normal((D, D_OUT))
    patterns = rng.standard_normal((N, K, K))
    patterns += (1.0 - patterns.sum(axis=2, keepdims=True)) / K
    labels = patterns @ tokens @ total
    if intercept is not None:
        labels, total = labels + intercept, np.vstack([total, intercept])
    return Rows(tokens, labels, np.ones(N)), patterns, total


@pytest.mark.parametrize("affine", [False, True])
def test_exact_rows_give_back_their_patterns(rng, affine):
    rows, patterns, total = one_pattern_rows(rng, rng.standard_normal(D_OUT) if affine else None)
    fit = fit_patterns(rows, total)
    assert fit.determined.all()
    # A 2 x 2 solve for every sample, some of condition 1e4.
    np.testing.assert_allclose(fit.patterns, patterns, atol=1e-9)
    np.testing.assert_allclose(fit.patterns.sum(axis=2), 1.0, atol=1e-12)
    assert fit.error.max() < 1e-24


def test_other_rows_get_the_least_squares_pattern(rng):
    rows, _, total = one_pattern_rows(rng)
    rows = Rows(rows.tokens, rng.standard_normal((N, K, D_OUT)), rng.uniform(0.5, 2.0, N))
    fit = fit_patterns(rows, total)
    power = np.average(np.sum(rows.labels**2, axis=2).mean(axis=1), weights=rows.weights)
    for s in range(N):
        projected = rows.tokens[s] @ total
        differences = projected[:-1] - projected[-1]
        for a in range(K):
            target = rows.labels[s, a] - projected[-1]
            leading = np.linalg.lstsq(differences.T, target, rcond=None)[0]
            np.testing.assert_allclose(fit.patterns[s, a, :-1], leading, atol=1e-8)
            residual = target - leading @ differences
            np.testing.assert_allclose(fit.residual[s, a], residual, atol=1e-8)
            assert fit.error[s, a] == pytest.approx(residual @ residual / power, rel=1e-6)
        inverse = np.linalg.inv(differences @ differences.T)
        np.testing.assert_allclose(fit.inverse[s], inverse, rtol=1e-6, atol=1e-6 * np.abs(inverse).max())


def test_equal_tokens_determine_no_pattern(rng):
    rows, _, total = one_pattern_rows(rng)
    tokens = rows.tokens.copy()
    tokens[4, 1] = tokens[4, 2]
    tokens[7] = 0.0
    with np.errstate(all="raise"):
        fit = fit_patterns(Rows(tokens, rows.labels, rows.weights), total)
    assert list(np.flatnonzero(~fit.determined)) == [4, 7]
    assert np.isfinite(fit.patterns).all() and np.isfinite(fit.error).all()


def test_residuals_measure_disagreement():
    """The certificate: with the true sum, small residuals mean equal patterns."""
    examples, layer = draw_examples(2, 3, 8, 4.0, 4000, 0)
    rows = load_rows(examples)
    total = layer.projection.sum(axis=0) / examples.units.label_scale
    fit = fit_patterns(rows, total)
    patterns = layer.attention_weights(rows.tokens)
    apart = np.abs(patterns[:, 0] - patterns[:, 1]).max(axis=2)
    error = np.where(fit.determined[:, None], fit.error, np.nan)
    best, worst = error <= np.nanquantile(error, 0.02), error >= np.nanquantile(error, 0.5)
    # Measured 0.03 and 0.7.
    assert np.quantile(apart[best], 0.9) < 0.1 < 0.4 < np.median(apart[worst])
    np.testing.assert_allclose(fit.patterns[best], patterns.mean(axis=1)[best], atol=0.2)


def test_few_outputs_hide_disagreement():
    """The case that must fail: with d_out = k - 1 a pattern explains every row."""
    examples, layer = draw_examples(2, 4, 8, 4.0, 500, 0, n_outputs=3)
    total = layer.projection.sum(axis=0) / examples.units.label_scale
    fit = fit_patterns(load_rows(examples), total)
    assert fit.error[fit.determined].max() < 1e-6


class TestNoAgreement:
    def examples(self, readout="tokens", k=3, d_out=3):
        tokens = np.random.default_rng(0).standard_normal((20, k, D))
        n_rows = k if readout == "tokens" else 1
        return make_examples(tokens, np.ones((20, n_rows, d_out)), readout=readout)

    def test_rows_can_show_their_pattern(self):
        assert no_agreement(self.examples()) is None
        assert no_agreement(self.examples("first")) is None

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"readout": "mean"}, "averaged rows mix"),
            ({"k": 1}, "a single token has no pattern"),
            ({"d_out": 2}, "n_outputs=2 must exceed n_tokens - 1 = 2"),
        ],
    )
    def test_rows_cannot(self, settings, words):
        assert words in no_agreement(self.examples(**settings))


def test_rows_carry_weights_and_queries(rng):
    tokens, labels = rng.standard_normal((20, K, D)), rng.standard_normal((20, 1, D_OUT))
    weights = rng.uniform(0.5, 2.0, 20)
    examples = make_examples(tokens, labels, readout="first", sample_weight=weights, random_state=0)
    rows = load_rows(examples)
    np.testing.assert_array_equal(rows.weights, examples.weights)
    np.testing.assert_array_equal(rows.queries, rows.tokens[:, :1])
    assert rows.label_power == pytest.approx(D_OUT, rel=1e-12)
    some = rows.take(np.array([3, 1]))
    np.testing.assert_array_equal(some.labels, rows.labels[[3, 1]])
