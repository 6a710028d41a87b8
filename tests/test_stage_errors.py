from dataclasses import replace

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._stage_errors import stage_errors


@pytest.fixture(scope="module")
def fitted():
    sampler = BooleanAttentionSampler(3, 3, 8, n_outputs=6, attention_scale=1.0, random_state=0)
    X, y = sampler.sample(3000)
    return MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y), sampler.layer_


def test_sums_are_compared_by_their_relative_error(fitted):
    learner, truth = fitted
    errors = stage_errors(learner.stages_, truth)
    total = truth.projection.sum(axis=0)
    for name in ("crude_sum", "refine_sum"):
        expected = np.linalg.norm(learner.stages_[name].total - total) / np.linalg.norm(total)
        assert errors[name].error == pytest.approx(expected)
    assert errors["refine_sum"].error < errors["crude_sum"].error


def test_heads_end_at_rounding(fitted):
    learner, truth = fitted
    errors = stage_errors(learner.stages_, truth)
    assert errors["polish"].error < 1e-10 and errors["polish"].error < errors["heads"].error < 1e-2


def with_span(learner, basis):
    return {**learner.stages_, "span": replace(learner.stages_["span"], basis=basis)}


def test_span_error_is_the_sine_of_the_worst_angle(fitted):
    learner, truth = fitted
    assert learner.stages_["span"].source == "moments"
    exact = stage_errors(with_span(learner, truth.attention), truth)["span"]
    # A residual of rounding: 8 x 8 entries of order one.
    assert exact.error < 1e-13
    assert exact.cosine == pytest.approx(1.0)
    missing = stage_errors(with_span(learner, truth.attention[:2]), truth)["span"]
    flat = truth.attention.reshape(3, -1)
    basis = np.linalg.qr(flat[:2].T)[0]
    expected = np.linalg.norm(basis.T @ flat[2]) / np.linalg.norm(flat[2])
    assert missing.cosine == pytest.approx(expected)
    assert "2 directions" in missing.compared


def test_affine_span_is_compared_with_differences(fitted):
    learner, truth = fitted
    differences = truth.attention[1:] - truth.attention[0]
    frames = tuple(replace(frame, affine=True) for frame in learner.stages_["span"].frames)
    span = replace(learner.stages_["span"], basis=differences, frames=frames)
    error = stage_errors({**learner.stages_, "span": span}, truth)["span"]
    assert error.error < 1e-13
    assert "differences" in error.compared


def test_sculpted_axes_are_compared_in_the_units_of_the_data(fitted):
    learner, truth = fitted
    sculpture = learner.stages_["sculpt"]
    body = sculpture.body
    exact = body.units.attention_in(truth.attention[1:] - truth.attention[0])
    axes = exact.reshape(len(exact), 2, -1).transpose(1, 0, 2).reshape(2, -1)
    vectors = np.concatenate([axes.T, body.eigenvectors[:, 2:]], axis=1)
    ideal = replace(sculpture, body=replace(body, eigenvectors=vectors))
    errors = stage_errors({**learner.stages_, "sculpt": ideal}, truth)
    assert errors["sculpt"].error < 1e-12
    assert errors["sculpt"].error < stage_errors(learner.stages_, truth)["sculpt"].error < 1


def test_what_cannot_be_compared_is_left_out():
    sampler = BooleanAttentionSampler(1, 2, 4, n_outputs=1, random_state=0)
    learner = MultiHeadAttentionLearner(n_tokens=2, random_state=0).fit(*sampler.sample(300))
    # One output certifies no row, two tokens have no moments, one head has no differences.
    assert list(stage_errors(learner.stages_, sampler.layer_)) == [
        "crude_sum",
        "refine_sum",
        "heads",
        "polish",
    ]


def test_another_number_of_heads_is_an_infinite_error(fitted):
    learner, truth = fitted
    fewer = AttentionLayer(truth.attention[:2], truth.projection[:2])
    errors = stage_errors(learner.stages_, fewer)
    assert errors["heads"].error == errors["polish"].error == np.inf


def test_layer_of_another_size_is_refused(fitted):
    learner, truth = fitted
    other = AttentionLayer(truth.attention, truth.projection[:, :, :3])
    with pytest.raises(ValueError, match=r"\(8, 3\), the learner was fitted on \(8, 6\)"):
        stage_errors(learner.stages_, other)
