"""The sum of the projections, refined on rows where the heads agree."""

import numpy as np
import pytest
from bank import draw_examples, relative_error

from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import EXACT_AGREEMENT, estimate_crude_sum, refine_sum


def refined_error(examples, layer, **settings):
    refined = refine_sum(examples, estimate_crude_sum(examples).internal, **settings)
    return relative_error(refined.total, layer.projection.sum(axis=0)), refined


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("s", [0.5, 2.0, 8.0, 16.0])
def test_one_head_to_rounding(s, seed):
    error, refined = refined_error(*draw_examples(1, 4, 8, s, 1000, seed))
    assert error < 1e-10 and refined.disagreement < 1e-18 and refined.improved


@pytest.mark.parametrize("affine", [False, True])
def test_one_affine_head_to_rounding(affine):
    examples, layer = draw_examples(
        1, 4, 8, 2.0, 1000, 0, fit_intercept=True, key_bias_scale=0.5, intercept_scale=1.0 * affine
    )
    error, refined = refined_error(examples, layer)
    assert error < 1e-10
    assert refined.internal.shape == (9, 8)
    intercept = refined.internal[-1] * examples.units.label_scale + examples.units.label_shift
    np.testing.assert_allclose(intercept, layer.intercept, atol=1e-8)


@pytest.mark.parametrize(
    ("teacher", "bound"),
    # The bounds are twice to four times the worst of five seeds.
    [((2, 3, 8, 4.0), 2e-3), ((2, 4, 10, 1.0), 0.1), ((3, 3, 10, 1.0), 0.1), ((2, 3, 8, 16.0), 1e-5)],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stages_worth_of_samples(teacher, bound, seed):
    examples, layer = draw_examples(*teacher, 2000, seed)
    crude = relative_error(estimate_crude_sum(examples).total, layer.projection.sum(axis=0))
    error, _ = refined_error(examples, layer)
    assert error < bound < crude


def test_first_readout():
    examples, layer = draw_examples(1, 4, 8, 2.0, 2000, 0)
    first = make_examples(examples.tokens, examples.labels[:, :1], readout="first", random_state=0)
    error, refined = refined_error(first, layer)
    assert error < 1e-8 and refined.improved


def test_weights_equal_repetition():
    examples, _ = draw_examples(2, 3, 8, 4.0, 500, 0)
    weights = np.random.default_rng(0).integers(0, 4, 500)
    tokens, labels = examples.tokens, examples.labels
    weighted = make_examples(tokens, labels, sample_weight=weights.astype(float), random_state=0)
    repeated = make_examples(
        np.repeat(tokens, weights, axis=0), np.repeat(labels, weights, axis=0), random_state=0
    )
    first, second = (refine_sum(e, estimate_crude_sum(e).internal) for e in (weighted, repeated))
    np.testing.assert_array_equal(first.total, second.total)


def test_rows_kept_are_counted():
    examples, _ = draw_examples(2, 3, 8, 4.0, 2000, 0)
    crude = estimate_crude_sum(examples).internal
    # 24 equations for each of 64 unknowns, six of a row's eight being free.
    assert refine_sum(examples, crude).n_rows == 24 * 64 / 6
    assert refine_sum(examples, crude, fraction=0.2).n_rows == int(0.2 * 3 * examples.n_samples)


def test_unweighted_disagreement_is_the_worst_of_the_rows_kept():
    examples, _ = draw_examples(2, 3, 8, 4.0, 2000, 0)
    crude = estimate_crude_sum(examples).internal
    few, many = (refine_sum(examples, crude, fraction=fraction) for fraction in (0.05, 0.5))
    assert 0.0 < few.disagreement < many.disagreement < 1.0
    assert f"{few.disagreement:.1e}" in few.message


class TestCannot:
    """The cases that must fail keep the crude sum and say why."""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [({"n_outputs": 3}, "n_outputs=3 must exceed n_tokens - 1 = 3"), ({"n_tokens": 1}, "a single token")],
    )
    def test_no_row_has_a_pattern_of_its_own(self, settings, words):
        k = settings.pop("n_tokens", 4)
        examples, _ = draw_examples(2, k, 8, 1.0, 200, 0, **settings)
        crude = estimate_crude_sum(examples)
        refined = refine_sum(examples, crude.internal)
        assert not refined.improved and refined.disagreement == np.inf and refined.n_rows == 0
        np.testing.assert_array_equal(refined.total, crude.total)
        assert refined.message.startswith("kept the crude sum: ") and words in refined.message

    def test_averaged_rows(self):
        examples, _ = draw_examples(2, 4, 8, 1.0, 200, 0)
        labels = examples.labels.mean(axis=1, keepdims=True)
        mean = make_examples(examples.tokens, labels, readout="mean")
        refined = refine_sum(mean, estimate_crude_sum(mean).internal)
        assert not refined.improved and "averaged rows" in refined.message

    def test_few_samples(self):
        """Fewer rows than are to be kept: all are, and the result is what they allow."""
        error, refined = refined_error(*draw_examples(2, 4, 8, 1.0, 10, 0))
        assert refined.n_rows == 40 and np.isfinite(error)


def test_two_heads_never_agree_exactly():
    _, refined = refined_error(*draw_examples(2, 4, 8, 1.0, 2000, 0))
    assert refined.disagreement > EXACT_AGREEMENT * 1e10
