"""A sample of weight 0 is not there; a sample of weight 2 is there twice. In every stage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

READOUTS = ["tokens", "first", "mean"]
K, D, D_OUT = 3, 6, 4


def read(y, readout):
    return {"tokens": y, "first": y[:, 0], "mean": y.mean(axis=1)}[readout]


def sample(readout="tokens", *, n=400, noise=0.0, seed=0):
    """Two heads, two of K tokens; labels may be noisy. Returns X, y and weights 0, 1, 2, 3."""
    sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, noise_std=noise, random_state=seed)
    X, y = sampler.sample(n, as_tokens=True)
    weights = np.random.default_rng(seed).integers(0, 4, size=n)
    return X, read(y, readout), weights


def repeat(weights, *arrays):
    return tuple(np.repeat(array, weights, axis=0) for array in arrays)


def relative_difference(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("noise, tolerance", [(0.0, 1e-8), (0.3, 1e-6)])
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("n_heads", ["auto", 2])
def test_weights_equal_repetition(readout, n_heads, noise, tolerance):
    """The tolerances are the ones promised; merged samples make the two fits all but identical."""
    X, y, weights = sample(readout, noise=noise)
    learner = MultiHeadAttentionLearner(n_heads, readout=readout, max_heads=3, heads_starts=4, random_state=0)
    weighted = clone(learner).fit(X, y, sample_weight=weights)
    repeated = clone(learner).fit(*repeat(weights, X, y))
    assert weighted.n_heads_ == repeated.n_heads_
    assert relative_difference(weighted.predict(X), repeated.predict(X)) <= tolerance
    if not noise:
        assert weighted.score(X, y) > 1 - 1e-12


@pytest.mark.parametrize("noise, tolerance", [(0.0, 1e-8), (0.3, 1e-6)])
@pytest.mark.parametrize("readout", READOUTS)
def test_weight_zero_equals_removal_even_of_nonsense(readout, noise, tolerance):
    X, y, _ = sample(readout, noise=noise)
    kept = np.arange(len(X)) % 4 != 0
    X_spoilt, y_spoilt = X.astype(float), y.copy()
    X_spoilt[~kept] *= 1e6
    y_spoilt[~kept] = 1e9
    learner = MultiHeadAttentionLearner(2, readout=readout, heads_starts=4, random_state=0)
    weighted = clone(learner).fit(X_spoilt, y_spoilt, sample_weight=kept.astype(float))
    removed = clone(learner).fit(X[kept], y[kept])
    assert relative_difference(weighted.predict(X), removed.predict(X)) <= tolerance


def numbers(result):
    """Everything that a stage estimated, as arrays by name."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    values.pop("seconds")
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray | float | int)}
    for name in ("layer", "body"):
        part = values.get(name)
        if part is not None:
            inner = {key: value for key, value in vars(part).items() if isinstance(value, np.ndarray)}
            arrays |= {f"{name}.{key}": value for key, value in inner.items()}
    return arrays


@pytest.mark.parametrize("kind", ["zero", "repeat"])
@pytest.mark.parametrize("span", ["auto", "oracle"])
def test_every_stage_sees_the_same(kind, span):
    """Selections, quantiles and the held-out split included: each stage's numbers are the same."""
    sampler = BooleanAttentionSampler(2, K, 4, n_outputs=6, attention_scale=1, noise_std=0.01, random_state=0)
    X, y = sampler.sample(500, as_tokens=True)
    weights = np.random.default_rng(0).integers(0, 2 if kind == "zero" else 3, size=len(X))
    learner = MultiHeadAttentionLearner(2, span=span, oracle_rounds=1, stage_samples=200, random_state=0)
    weighted = clone(learner).fit(X, y, sample_weight=weights)
    repeated = clone(learner).fit(*repeat(weights, X, y))
    assert weighted.stages_["sculpt"].body is not None
    for name, result in weighted.stages_.items():
        found, expected = numbers(result), numbers(repeated.stages_[name])
        assert list(found) == list(expected)
        for key, value in found.items():
            # Equal to the last bit, because both fits compute on the same merged samples.
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{name}.{key}")


def test_only_ratios_of_weights_matter():
    X, y, weights = sample("first", noise=0.3)
    learner = MultiHeadAttentionLearner(2, readout="first", random_state=0)
    once = clone(learner).fit(X, y, sample_weight=weights)
    scaled = clone(learner).fit(X, y, sample_weight=weights * 1e-7)
    assert relative_difference(scaled.predict(X), once.predict(X)) <= 1e-6


def test_equal_weights_are_no_weights():
    X, y, _ = sample("tokens", noise=0.3)
    learner = MultiHeadAttentionLearner(2, random_state=0)
    plain = clone(learner).fit(X, y)
    weighted = clone(learner).fit(X, y, sample_weight=np.full(len(X), 0.7))
    assert relative_difference(weighted.predict(X), plain.predict(X)) <= 1e-6


def test_fractional_weights_pull_the_fit():
    """A weighted fit is better than an unweighted one where the weight is."""
    X, y, _ = sample("first", noise=0.2, n=600)
    weights = np.where(np.arange(len(X)) < 150, 1.0, 0.01)
    learner = MultiHeadAttentionLearner(2, readout="first", random_state=0)
    plain = clone(learner).fit(X, y)
    weighted = clone(learner).fit(X, y, sample_weight=weights)
    assert weighted.score(X, y, weights) > plain.score(X, y, weights)
    assert weighted.score(X, y) < plain.score(X, y)


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("flat", [False, True])
def test_score_with_weights(readout, flat):
    X, y, weights = sample(readout, noise=0.5)
    y = y.reshape(len(y), -1) if flat else y
    learner = MultiHeadAttentionLearner(2, readout=readout, random_state=0).fit(X, y)
    weighted = learner.score(X, y, sample_weight=weights)
    # The same sums in another order.
    assert weighted == pytest.approx(learner.score(*repeat(weights, X, y)), abs=1e-12)
    assert weighted != pytest.approx(learner.score(X, y), abs=1e-6)


def spoilt(readout):
    """Two thirds good samples, one third with labels of nonsense and weight 0; also flat."""
    sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, random_state=3)
    X, y = sampler.sample(300, as_tokens=True)
    y = read(y, readout).reshape(len(X), -1)
    weights = (np.arange(len(X)) % 3 > 0).astype(float)
    y[weights == 0] = 100.0
    return X.reshape(len(X), -1), y, weights, sampler.layer_


def requesting(**settings):
    learner = MultiHeadAttentionLearner(2, n_tokens=K, random_state=0, **settings)
    return learner.set_fit_request(sample_weight=True).set_score_request(sample_weight=True)


@pytest.mark.parametrize("readout", READOUTS)
def test_weights_are_routed_through_a_pipeline(readout):
    X, y, weights, truth = spoilt(readout)
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(FunctionTransformer(), requesting(readout=readout))
        pipeline.fit(X, y, sample_weight=weights)
        assert head_recovery_error(truth, pipeline[-1].layer_) < 1e-9
        assert pipeline.score(X, y, sample_weight=weights) > 1 - 1e-12
        assert pipeline.score(X, y) < 0.5


def test_weights_are_routed_through_a_grid_search_of_a_pipeline():
    X, y, weights, truth = spoilt("first")
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(FunctionTransformer(), requesting(readout="first"))
        grid = {"multiheadattentionlearner__n_heads": [1, 2]}
        search = GridSearchCV(pipeline, grid, cv=KFold(3), error_score="raise")
        search.fit(X, y, sample_weight=weights)
        assert search.best_params_ == {"multiheadattentionlearner__n_heads": 2}
        assert search.best_score_ > 0.999999
        assert head_recovery_error(truth, search.best_estimator_[-1].layer_) < 1e-9


def test_weights_are_routed_through_cross_validation():
    X, y, weights, _ = spoilt("mean")
    with config_context(enable_metadata_routing=True):
        results = cross_validate(
            requesting(readout="mean"), X, y, params={"sample_weight": weights}, cv=3, error_score="raise"
        )
    assert results["test_score"].min() > 0.999999


def test_unrequested_weights_are_refused_when_routed():
    X, y, weights, _ = spoilt("first")
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(MultiHeadAttentionLearner(2, n_tokens=K, readout="first"))
        with pytest.raises(ValueError, match="sample_weight"):
            pipeline.fit(X, y, sample_weight=weights)
