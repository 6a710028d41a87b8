"""All digits, from few samples where that is enough and from all where it is not."""

import numpy as np
import pytest
from bank import draw_examples
from sklearn import config_context

from sklearn_mhal import head_recovery_error
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import polish
from sklearn_mhal.stages._finish import finish
from sklearn_mhal.stages.polish import soft_samples


def near(examples, layer, distance=1e-2, seed=0):
    stacked = examples.units.attention_in(layer.attention, layer.key_bias)
    return stacked + distance * np.random.default_rng(seed).standard_normal(stacked.shape)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("s", [0.5, 4.0, 16.0])
def test_noise_free_layers_to_rounding(s, affine):
    examples, layer = draw_examples(
        2, 4, 8, s, 1000, 0, fit_intercept=affine, key_bias_scale=0.5 * affine, intercept_scale=1.0 * affine
    )
    result = polish(examples, near(examples, layer))
    assert result.converged and result.parameter_error < 1e-10 and result.error < 1e-20
    assert head_recovery_error(layer, result.layer, include_affine=True) < 1e-10
    # Few samples determine it; one pass over all of them has confirmed it.
    assert result.n_samples < examples.n_samples == 1000
    assert "on all samples" in result.message


def test_noise_needs_all_samples():
    examples, layer = draw_examples(2, 4, 8, 2.0, 2000, 0, noise_std=0.1)
    result = polish(examples, near(examples, layer))
    assert result.converged and result.n_samples == 2000
    noise = 0.01 / np.mean(examples.labels**2)
    assert result.error == pytest.approx(noise, rel=0.05)
    assert 1e-4 < head_recovery_error(layer, result.layer) < 0.1


def test_noise_on_all_samples_is_their_least_squares_solution():
    """Whatever the start and the memory, and though curvature comes from a part."""
    examples, layer = draw_examples(2, 3, 6, 2.0, 6000, 0, noise_std=0.3)
    first = polish(examples, near(examples, layer))
    with config_context(working_memory=1):
        second = polish(examples, near(examples, layer, seed=1))
    # A millionth of a standard error is what the finish leaves; a standard error is about 1e-2.
    np.testing.assert_allclose(first.layer.attention, second.layer.attention, atol=1e-6)
    problem = examples.problem()
    at = problem.evaluate(first.attention).error
    rng = np.random.default_rng(2)
    for _ in range(5):
        direction = 1e-3 * rng.standard_normal(first.attention.shape)
        assert problem.evaluate(first.attention + direction).error > at


def test_finish_equals_a_solve_on_all_samples():
    examples, layer = draw_examples(2, 3, 6, 2.0, 3000, 0, noise_std=0.3)
    settings = {"tol": 1e-12, "max_iter": 100, "ridge": 1e-3, "attention_ridge": 1e-3, "n_jobs": None}
    start = near(examples, layer)
    parts = [finish(examples, start, n_part=n_part, **settings) for n_part in (500, 3000)]
    for solution in parts:
        assert solution.converged
        np.testing.assert_allclose(solution.attention, parts[1].attention, atol=1e-7)
        np.testing.assert_allclose(solution.projection, parts[1].projection, atol=1e-7)


@pytest.mark.parametrize("name", ["ridge", "attention_ridge"])
def test_penalties_shrink(name):
    examples, layer = draw_examples(2, 3, 6, 2.0, 500, 0)
    start = near(examples, layer)
    sizes = []
    for penalty in (0.0, 0.01, 0.3):
        result = polish(examples, start, **{name: penalty})
        part = result.layer.projection if name == "ridge" else result.layer.attention
        sizes.append(np.linalg.norm(part))
    assert sizes[0] > sizes[1] > sizes[2] and sizes[2] < 0.9 * sizes[0]


def test_max_iter_is_reported():
    examples, layer = draw_examples(2, 3, 6, 2.0, 500, 0)
    result = polish(examples, near(examples, layer, 0.1), max_iter=1)
    assert not result.converged and result.parameter_error > 1e-10
    assert result.n_iter <= 3 and "max_iter=1" in result.message


def test_a_wrong_number_of_heads_is_not_polished_to_zero():
    """The case that must fail: one head for two leaves a residual, and it is reported."""
    examples, layer = draw_examples(2, 3, 6, 2.0, 500, 0)
    result = polish(examples, near(examples, layer)[:, :6])
    assert result.error > 1e-3 and f"{result.error:.1e}" in result.message


def test_weight_two_is_twice():
    examples, layer = draw_examples(2, 3, 6, 2.0, 600, 0, noise_std=0.2)
    tokens, labels = examples.tokens, examples.labels
    weights = np.random.default_rng(0).integers(0, 3, 600)
    weighted = make_examples(tokens, labels, sample_weight=weights.astype(float), random_state=0)
    repeated = make_examples(
        np.repeat(tokens, weights, axis=0), np.repeat(labels, weights, axis=0), random_state=0
    )
    first, second = (polish(given, near(given, layer)).layer for given in (weighted, repeated))
    np.testing.assert_array_equal(first.attention, second.attention)
    np.testing.assert_array_equal(first.projection, second.projection)


class TestSoftSamples:
    def test_are_those_with_the_softest_patterns(self):
        examples, layer = draw_examples(2, 4, 8, 8.0, 600, 0)
        attention = examples.units.attention_in(layer.attention)
        chosen = soft_samples(examples, attention, 50)
        assert chosen.n_samples == 50
        patterns = layer.attention_weights(examples.tokens[examples.order])
        softness = (1.0 - (patterns**2).sum(axis=3)).mean(axis=(1, 2))
        expected = np.sort(np.argsort(-softness, kind="stable")[:50])
        np.testing.assert_array_equal(chosen.order, examples.order[expected])

    def test_all_where_there_are_no_more(self):
        examples, layer = draw_examples(2, 4, 8, 8.0, 60, 0)
        assert soft_samples(examples, examples.units.attention_in(layer.attention), 60) is examples
