"""The bank of teachers crossed with the ways to solve them.

One seed with default settings runs in the quick suite. The whole cross, three seeds and every way
of solving (minutes): ``pytest -m slow tests/test_bank.py``.
"""

import warnings

import numpy as np
import pytest
from bank import TEACHERS

from sklearn_mhal import MultiHeadAttentionLearner, head_recovery_error

# What the package promises, and the accuracy that `tol` asks for by default.
PROMISED = 1e-10


def fit(teacher, seed, *, n_samples=None, **settings):
    X, y, truth = teacher.draw(seed, n_samples=n_samples)
    return MultiHeadAttentionLearner(random_state=seed, **settings).fit(X, y), truth


def assert_recovered(learner, truth):
    assert learner.n_heads_ == truth.n_heads, learner.stages_["heads"].message
    error = head_recovery_error(truth, learner.layer_, include_affine=True)
    assert error <= PROMISED, learner.stages_["polish"].message


def test_the_bank_is_as_wide_as_claimed():
    assert len(TEACHERS) >= 30 and len({str(teacher) for teacher in TEACHERS}) == len(TEACHERS)
    assert {teacher.m for teacher in TEACHERS} == {1, 2, 3, 4, 5, 6}
    assert {teacher.k for teacher in TEACHERS} >= {2, 3, 4, 5, 6, 8}
    assert min(t.d for t in TEACHERS) == 4 and max(t.d for t in TEACHERS) == 16
    assert min(t.s for t in TEACHERS) == 0.5 and max(t.s for t in TEACHERS) == 16
    assert {t.structure for t in TEACHERS} == {"incoherent", "low_rank", "correlated", "multiscale"}
    assert {t.affine for t in TEACHERS} == {True, False}
    assert {t.d_out > t.d for t in TEACHERS} == {True, False} and any(t.d_out < t.d for t in TEACHERS)
    assert all(10 * t.information_limit <= t.n_samples <= 20_000 for t in TEACHERS)


def test_the_drawn_layers_are_the_ones_described():
    for teacher in TEACHERS:
        X, y, truth = teacher.draw(0)
        assert X.shape == (teacher.n_samples, teacher.k, teacher.d)
        assert y.shape == (teacher.n_samples, teacher.k, teacher.d_out)
        assert (truth.n_heads, truth.n_features) == (teacher.m, teacher.d)
        assert np.any(truth.key_bias) == teacher.affine == np.any(truth.intercept)


@pytest.mark.parametrize("teacher", TEACHERS, ids=str)
def test_default_settings(teacher):
    """Counts the heads and recovers each to ten digits, told nothing."""
    assert_recovered(*fit(teacher, 0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("teacher", TEACHERS, ids=str)
def test_default_settings_with_other_seeds(teacher, seed):
    assert_recovered(*fit(teacher, seed))


@pytest.mark.slow
@pytest.mark.parametrize("teacher", TEACHERS, ids=str)
def test_more_samples_than_any_stage_needs(teacher):
    assert_recovered(*fit(teacher, 3, n_samples=20_000))


@pytest.mark.slow
@pytest.mark.parametrize("teacher", TEACHERS, ids=str)
def test_number_of_heads_given(teacher):
    assert_recovered(*fit(teacher, 0, n_heads=teacher.m))


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [t for t in TEACHERS if not t.affine], ids=str)
def test_no_intercept(teacher):
    learner, truth = fit(teacher, 0, fit_intercept=False)
    assert_recovered(learner, truth)
    assert not np.any(learner.intercept_) and not np.any(learner.key_bias_)


# What `estimate_span` promises of a source alone, with enough samples for it.
SCULPTED = [t for t in TEACHERS if t.d_out > t.k - 1 and t.m <= 4]
SEEN_BY_MOMENTS = [t for t in TEACHERS if t.k >= 3 and t.structure != "multiscale"]


@pytest.mark.slow
@pytest.mark.parametrize("teacher", SCULPTED, ids=str)
def test_sculpted_span_alone(teacher):
    learner, truth = fit(teacher, 0, n_samples=2000, n_heads=teacher.m, span="sculpt")
    assert learner.stages_["heads"].source == "sculpt"
    assert_recovered(learner, truth)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", SEEN_BY_MOMENTS, ids=str)
def test_moment_span_alone(teacher):
    learner, truth = fit(teacher, 0, n_samples=2000, n_heads=teacher.m, span="moments")
    assert learner.stages_["heads"].source == "moments"
    assert_recovered(learner, truth)


THREE_HEADS = [t for t in TEACHERS if t.m == 3 and t.structure == "incoherent"]


@pytest.mark.parametrize("teacher", THREE_HEADS, ids=str)
def test_one_head_too_few_is_not_an_answer(teacher):
    """The case that must fail: no fit with fewer heads explains the labels, and its error says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner, truth = fit(teacher, 0, n_heads=teacher.m - 1)
    assert head_recovery_error(truth, learner.layer_) == np.inf
    # The smallest share that one head more explained on any teacher of the design's trial.
    assert learner.stages_["heads"].held_out_error > 9e-4


def test_fewer_samples_than_unknowns_is_not_an_answer():
    """The case that must fail: half the information limit determines no layer, and none is claimed."""
    teacher = next(t for t in TEACHERS if t.m == 2 and t.d == 10 and not t.affine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner, truth = fit(teacher, 0, n_samples=teacher.information_limit // 2)
    assert head_recovery_error(truth, learner.layer_) > 1e-2
