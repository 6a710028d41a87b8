"""What must hold whatever users do: one test for each behaviour that was reported against others."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from dataclasses import replace

import cvxpy as cp
import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import linalg
from sklearn import config_context, set_config
from sklearn.base import clone, is_regressor
from sklearn.callback import ScoringMonitor
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    RepeatedKFold,
    cross_val_score,
    learning_curve,
    train_test_split,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, StandardScaler
from sklearn.utils import get_tags

import sklearn_mhal.learner
from sklearn_mhal import (
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)
from sklearn_mhal._convex import ConvexProgramError, minimum_norm_point
from sklearn_mhal.stages._body import ConvexBody

N, K, D, D_OUT = 300, 3, 6, 4
# A layer read off noise-free samples; the promise of the package is ten digits.
EXACT = 1e-10
STAGES = ["crude_sum", "sculpt", "refine_sum", "span", "heads", "polish"]


def learner(**settings):
    return MultiHeadAttentionLearner(**({"n_heads": 2, "n_tokens": K, "random_state": 0} | settings))


@pytest.fixture(scope="module")
def deep():
    """Tokens (N, K, D), labels (N, K, D_OUT) and the layer; read-only."""
    sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, random_state=0)
    X, y = sampler.sample(N, as_tokens=True)
    X.flags.writeable = y.flags.writeable = False
    return X, y, sampler.layer_


@pytest.fixture(scope="module")
def flat(deep):
    """The same flattened to 2-D."""
    X, y, truth = deep
    return X.reshape(N, -1), y.reshape(N, -1), truth


@pytest.fixture(scope="module")
def first(flat):
    """Flat tokens and the first row's labels."""
    X, y, truth = flat
    return X, y[:, :D_OUT], truth


def same(found, expected):
    """Assert that two fitted learners have the same parameters, to the last bit."""
    for name in ("attention", "projection", "key_bias", "intercept"):
        np.testing.assert_array_equal(getattr(found.layer_, name), getattr(expected.layer_, name))


def test_01_y_as_vector_or_as_one_column(first):
    X, y, _ = first
    vector, column = y[:, 0], y[:, :1]
    one = learner(readout="first").fit(X, vector)
    two = learner(readout="first").fit(X, column)
    same(one, two)
    assert one.predict(X).shape == (N,)
    assert two.predict(X).shape == (N, 1)
    # Broadcasting (n,) against (n, 1) would make R^2 hugely negative.
    assert one.score(X, vector) == one.score(X, column) == two.score(X, vector) > 1 - 1e-12


def test_02_predict_on_one_sample_is_never_squeezed(deep, flat):
    X, y, _ = flat
    for readout, labels in {
        "tokens": [y, deep[1], y[:, [0, 4, 8]], deep[1][:, :, :1]],
        "first": [y[:, :D_OUT], y[:, :1], y[:, 0]],
        "mean": [y[:, :D_OUT], y[:, :1], y[:, 0]],
    }.items():
        for target in labels:
            model = learner(readout=readout, alpha=1e-3).fit(X, target)
            one = model.predict(X[:1])
            assert one.shape == (1, *target.shape[1:])
            np.testing.assert_allclose(one[0], model.predict(X)[0], rtol=0, atol=1e-12)
            assert model.predict(deep[0][:1]).shape == one.shape


def test_03_inside_transformed_target_regressor(flat):
    X, y, _ = flat
    exact = 1 - 1e-9
    for readout, target, score in [
        ("first", y[:, 0], exact),
        ("first", y[:, :1], exact),
        ("first", y[:, :D_OUT], exact),
        # Every column gets a scale of its own, so tokens are treated a little differently.
        ("tokens", y, 0.99),
    ]:
        model = TransformedTargetRegressor(learner(readout=readout), transformer=StandardScaler())
        model.fit(X, target)
        assert model.predict(X).shape == target.shape
        assert model.predict(X[:1]).shape == target[:1].shape
        assert model.score(X, target) > score


def test_04_repeated_cross_validation_of_a_pipeline_scores_no_nan(flat):
    X, y, _ = flat
    pipeline = make_pipeline(MinMaxScaler(), learner())
    scores = cross_val_score(pipeline, X, y, cv=RepeatedKFold(n_splits=3, n_repeats=2, random_state=0))
    assert scores.shape == (6,)
    assert scores.min() > 0.999999


def _flat(y):
    return y.reshape(len(y), -1)


def _deep(y):
    return y.reshape(len(y), K, -1)


def test_05_3d_labels_given_to_wrappers(deep, flat):
    X, y, _ = deep
    # What indexes or passes on whole samples works.
    assert cross_val_score(learner(), X, y, cv=2, error_score="raise").min() > 0.999999
    search = GridSearchCV(learner(), {"n_heads": [1, 2]}, cv=2, error_score="raise").fit(X, y)
    assert search.best_params_ == {"n_heads": 2}
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    assert learner().fit(X_train, y_train).score(X_test, y_test) > 0.999999
    _, _, scores = learning_curve(learner(), X, y, cv=2, train_sizes=[0.5, 1.0], error_score="raise")
    assert scores.min() > 0.999999
    # What knows two dimensions only says so before our code is called. The documentation names it and
    # the reshape, and with the reshape it works.
    documented = MultiHeadAttentionLearner.__doc__ + MultiHeadAttentionLearner.fit.__doc__
    assert documented.count("y.reshape(len(y), -1)") == 2
    for wrapper in (
        TransformedTargetRegressor(learner(), transformer=StandardScaler()),
        TransformedTargetRegressor(learner(), func=np.negative, inverse_func=np.negative),
        BaggingRegressor(learner(), n_estimators=2, random_state=0),
    ):
        with pytest.raises(ValueError, match=r"dim 3.*(dim )?<= 2"):
            clone(wrapper).fit(flat[0], y)
        assert type(wrapper).__name__ in documented or isinstance(wrapper, BaggingRegressor)
        labels = y.reshape(len(y), -1)
        assert wrapper.fit(flat[0], labels).predict(flat[0]).shape == labels.shape
        # Scaled column by column, tokens are treated a little differently.
        assert wrapper.score(flat[0], labels) > 0.99
    with pytest.raises(ValueError, match=r"dim 3.*(dim )?<= 2"):
        MultiOutputRegressor(learner(readout="first")).fit(X, y)
    columns = y[:, 0].reshape(len(y), -1)
    assert MultiOutputRegressor(learner(readout="first")).fit(X, columns).score(X, columns) > 0.999999
    with pytest.raises(ValueError, match=r"dim 3.*(dim )?<= 2"):
        cross_val_score(learner(), X, y, cv=2, scoring="r2", error_score="raise")
    assert cross_val_score(learner(), X, labels, cv=2, scoring="r2", error_score="raise").min() > 0.999999
    # A wrapper's transformer that knows the third dimension brings it through.
    flatten = FunctionTransformer(_flat, _deep, check_inverse=False)
    target = TransformedTargetRegressor(learner(), transformer=flatten).fit(X, y)
    np.testing.assert_allclose(target.predict(X), y, rtol=0, atol=1e-8)
    # And a layout that does not fit gets the shapes that do.
    with pytest.raises(ValueError, match=r"y has shape \(300, 3, 4\).*needs \(n_samples, 1, n_outputs\)"):
        learner(readout="first").fit(X, y)


def test_06_tags_and_representations(first):
    X, y, _ = first
    search = GridSearchCV(learner(readout="first"), {"n_heads": [1, 2]}, cv=2)
    pipeline = make_pipeline(learner(readout="first"))
    for model in (learner(readout="first"), pipeline, search):
        assert is_regressor(model)
        assert get_tags(model).estimator_type == "regressor"
        for state in (model, model.fit(X, y)):
            assert "MultiHeadAttentionLearner" in repr(state)
            assert "MultiHeadAttentionLearner" in state._repr_html_()
    tags = get_tags(learner())
    assert tags.input_tags.three_d_array
    assert tags.target_tags.multi_output and tags.target_tags.required
    assert repr(MultiHeadAttentionLearner(3)) == "MultiHeadAttentionLearner(n_heads=3)"
    assert "2 heads" in repr(search.best_estimator_.stages_) + search.best_estimator_.stages_._repr_html_()


def test_07_cloning_twice_keeps_every_parameter_as_it_came(flat):
    X, y, _ = flat
    given = {
        "n_heads": np.int64(2),
        "n_tokens": np.int32(K),
        "readout": np.str_("tokens"),
        "fit_intercept": np.bool_(True),
        "alpha": np.float32(0.5),
        "span": ("auto",),
        "tol": "1e-10",
    }
    model = MultiHeadAttentionLearner(**given)
    for name, value in given.items():
        assert getattr(model, name) is value
    copy = clone(clone(model))
    for name, value in given.items():
        assert getattr(copy, name) == value
        assert type(getattr(copy, name)) is type(value)
    # Nothing is computed or checked before fit; there numpy's scalars are as good as Python's.
    assert not [name for name in vars(copy) if name.endswith("_")]
    with pytest.raises(ValueError, match="'span' parameter"):
        copy.fit(X, y)
    copy.set_params(span="auto", tol=np.float64(1e-10), alpha=np.float32(0), random_state=np.int64(0))
    same(copy.fit(X, y), learner().fit(X, y))


GRID = {
    "n_heads": [1, "auto"],
    "n_tokens": [None, 1],
    "readout": ["first", "mean"],
    "fit_intercept": [True, False],
    "span": ["auto", "moments"],
    "max_heads": [1, 2],
    "stage_samples": [10, 2000],
    "refine_fraction": [0.005, 0.5],
    "refine_rounds": [1, 3],
    "sculpt_fraction": [0.02, 0.5],
    "sculpt_interior": [0.02, 0.1],
    "sculpt_vertex": [0.02, 0.1],
    "sculpt_margin": [0.5, 1.0],
    "sculpt_tolerance": [0.02, 0.1],
    "oracle_rounds": [1, 2],
    "heads_starts": [1, 2],
    "heads_net_points": [8, 64],
    "heads_max_tuples": [10, 100],
    "polish": [True, False],
    "alpha": [0.0, 0.1],
    "validation_fraction": [0.1, 0.5],
    "tol": [1e-10, 1e-3],
    "max_iter": [50, 100],
    "n_jobs": [None, 1],
    "random_state": [np.random.RandomState(0), np.random.default_rng(0)],
    "verbose": [0, False],
}


def test_08_grid_search_over_any_parameter_leaves_the_callers_objects(deep):
    # One token: what happens to the objects does not hang on attention, and fits take no time.
    X, y = deep[0][:60, 0], deep[1][:60, 0]
    assert set(GRID) == set(MultiHeadAttentionLearner().get_params())
    for name, values in GRID.items():
        model = MultiHeadAttentionLearner(1, readout="first", random_state=0)
        grid, before = {name: values}, pickle.dumps((values, model.get_params()))
        search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(X, y)
        assert grid == {name: values}
        assert all(one is another for one, another in zip(grid[name], values, strict=True))
        # Random states were not advanced either.
        assert pickle.dumps((values, model.get_params())) == before
        assert np.isfinite(search.best_score_)
        assert not hasattr(model, "layer_")


def test_09_parallel_search_with_callbacks_and_pickling(first):
    X, y, _ = first
    grid = {"n_heads": [1, 2]}
    model = learner(readout="first")
    serial = GridSearchCV(model, grid, cv=2, error_score="raise").fit(X, y)
    listening = clone(model).set_callbacks(ScoringMonitor(scoring="r2"))
    parallel = GridSearchCV(listening, grid, cv=2, n_jobs=2, error_score="raise").fit(X, y)
    np.testing.assert_array_equal(
        parallel.cv_results_["mean_test_score"], serial.cv_results_["mean_test_score"]
    )
    same(parallel.best_estimator_, serial.best_estimator_)
    copy = pickle.loads(pickle.dumps(listening.fit(X, y)))
    np.testing.assert_array_equal(copy.predict(X), serial.predict(X))


NESTED = """
import sys
from sklearn.model_selection import GridSearchCV
from threadpoolctl import threadpool_info
from sklearn_mhal import MultiHeadAttentionLearner, make_boolean_attention

class Counting(MultiHeadAttentionLearner):
    def _learn(self, *args, **kwargs):
        self.pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        return super()._learn(*args, **kwargs)
    def score(self, X, y):
        # A score that carries the number of threads out of the worker.
        return -max(self.pools)

if __name__ == "__main__":
    X, y = make_boolean_attention(200, n_heads=2, n_tokens=3, n_features=5, random_state=0)
    grid = {"n_heads": [1, 2]}
    for cls in (MultiHeadAttentionLearner, Counting):
        scores = []
        for n_jobs in (1, 2):
            model = cls(n_tokens=3, n_jobs=n_jobs, random_state=0)
            search = GridSearchCV(model, grid, cv=2, n_jobs=n_jobs, error_score="raise").fit(X, y)
            scores.append(list(search.cv_results_["mean_test_score"]))
        assert scores[0] == scores[1], scores
    assert scores[0] == [-1.0, -1.0], scores
"""


def test_10_jobs_inside_jobs_end_and_share_the_cores(tmp_path):
    """In a process of its own with a hard limit; each fit keeps one BLAS thread, so jobs are threads."""
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    # Also from a checkout that is not installed: the script lies elsewhere.
    environment["PYTHONPATH"] = os.getcwd()
    # Two minutes are forever: alone it takes seconds.
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_11_read_only_and_memory_mapped_input_stays_as_it_is(deep, tmp_path):
    X, y, _ = deep
    weights = np.arange(N) % 3 + 0.5
    expected = learner().fit(X.astype(np.float64), y, sample_weight=weights)
    arrays = {"X": X.astype(np.int8), "y": y, "weights": weights}
    files = {name: tmp_path / f"{name}.npy" for name in arrays}
    for name, array in arrays.items():
        np.save(files[name], array)
    before = {name: file.read_bytes() for name, file in files.items()}
    for mode in ("r", "r+"):
        mapped = {name: np.load(file, mmap_mode=mode) for name, file in files.items()}
        model = learner().fit(mapped["X"], mapped["y"], sample_weight=mapped["weights"])
        same(model, expected)
        model.predict(mapped["X"])
        model.score(mapped["X"], mapped["y"], sample_weight=mapped["weights"])
        model.attention_weights(mapped["X"])
        del mapped
        assert {name: file.read_bytes() for name, file in files.items()} == before
    frozen = {name: array.copy() for name, array in arrays.items()}
    for array in frozen.values():
        array.flags.writeable = False
    same(learner().fit(frozen["X"], frozen["y"], sample_weight=frozen["weights"]), expected)


@pytest.mark.parametrize("kind", ["C", "F", "int8", "float32", "frame", "labels"])
def test_12_input_is_never_modified_in_place(flat, kind):
    X, y, _ = flat
    X, y = X.astype(np.float64) * 3.0 + 1.0, y.copy()
    if kind in ("int8", "float32"):
        X = X.astype(kind)
    elif kind == "frame":
        X = pd.DataFrame(X).rename(columns=str)
    else:
        X = np.array(X, order="F" if kind == "F" else "C")
    if kind == "labels":
        y = np.asfortranarray(y)
    weights = np.linspace(0.0, 2.0, N)
    before = [X.copy(), y.copy(), weights.copy()]
    model = learner().fit(X, y, sample_weight=weights)
    model.predict(X)
    model.score(X, y, sample_weight=weights)
    for array, copy in zip((X, y, weights), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_13_frame_with_columns_in_another_order(flat):
    X, y, _ = flat
    frame = pd.DataFrame(X, columns=[f"column{index}" for index in range(K * D)])
    model = learner().fit(frame, y)
    swapped = frame[["column1", "column0", *frame.columns[2:]]]
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(swapped)
    with pytest.raises(ValueError, match=r"(?s)unseen at fit time.*- other.*missing.*- column3"):
        model.predict(frame.rename(columns={"column3": "other"}))


def test_14_rows_of_weight_zero_are_as_if_removed_in_every_stage():
    settings = {"n_outputs": D_OUT, "attention_scale": 1.0, "noise_std": 0.05, "random_state": 0}
    sampler = BooleanAttentionSampler(2, K, 4, **settings)
    X, y = sampler.sample(N, as_tokens=True)
    weights = np.where(np.arange(N) % 3 == 0, 0.0, 1.0 + np.arange(N) % 2)
    spoilt = np.where(weights[:, None, None] == 0, 1e9, y)
    kept = weights > 0
    whole = learner().fit(X, spoilt, sample_weight=weights)
    part = learner().fit(X[kept], y[kept], sample_weight=weights[kept])
    same(whole, part)
    for name in STAGES:
        found, expected = whole.stages_[name], part.stages_[name]
        assert found.n_samples == expected.n_samples
        assert found.message == expected.message
    assert whole.stages_["sculpt"].n_interior > 0
    np.testing.assert_array_equal(whole.stages_["refine_sum"].total, part.stages_["refine_sum"].total)
    np.testing.assert_array_equal(whole.stages_["span"].basis, part.stages_["span"].basis)
    np.testing.assert_array_equal(whole.stages_["heads"].attention, part.stages_["heads"].attention)
    assert whole.stages_["heads"].held_out_error == part.stages_["heads"].held_out_error


def test_15_weights_all_zero_or_negative(deep):
    X, y, _ = deep
    with pytest.raises(ValueError, match="at least one non-zero number"):
        learner().fit(X, y, sample_weight=np.zeros(N))
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        learner().fit(X, y, sample_weight=np.where(np.arange(N) == 7, -1e-9, 1.0))


@pytest.mark.parametrize("n_heads", ["auto", 2])
@pytest.mark.parametrize("readout", ["tokens", "first", "mean"])
def test_16_constant_labels(deep, readout, n_heads):
    X, _, _ = deep
    shape = (N, K, D_OUT) if readout == "tokens" else (N, D_OUT)
    for value in (0.0, -3.5, 1e8):
        model = learner(readout=readout, n_heads=n_heads).fit(X, np.full(shape, value))
        np.testing.assert_allclose(model.predict(-X), np.full(shape, value), rtol=1e-12, atol=0)
    model = learner(readout=readout, n_heads=n_heads, fit_intercept=False).fit(X, np.zeros(shape))
    np.testing.assert_array_equal(model.predict(-X), np.zeros(shape))


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_16_one_constant_output_column(deep, fit_intercept):
    X, y, _ = deep
    y = y.copy()
    y[:, :, 1] = 2.5 if fit_intercept else 0.0
    model = learner(fit_intercept=fit_intercept).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("value, word", [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_17_not_finite(deep, flat, value, word):
    for X, y, _ in (deep, flat):
        model = learner().fit(X, y)
        spoilt_X, spoilt_y = X.astype(np.float64), y.copy()
        spoilt_X.flat[5] = spoilt_y.flat[5] = value
        with pytest.raises(ValueError, match=f"Input X contains {word}"):
            learner().fit(spoilt_X, y)
        with pytest.raises(ValueError, match=f"Input y contains {word}"):
            learner().fit(X, spoilt_y)
        with pytest.raises(ValueError, match=f"Input X contains {word}"):
            model.predict(spoilt_X)
        with pytest.raises(ValueError, match=f"Input y contains {word}"):
            model.score(X, spoilt_y)


@pytest.mark.parametrize("dtype", ["U3", object])
def test_18_labels_of_strings(deep, dtype):
    X, y, _ = deep
    words = np.where(y[:, 0] > 0, "yes", "no").astype(dtype)
    numeric = "dtype='numeric' is not compatible|could not convert string to float"
    with pytest.raises(ValueError, match=numeric):
        learner(readout="first").fit(X, words)


def test_18_labels_of_numbers_as_objects(deep):
    X, y, _ = deep
    same(learner().fit(X, y.astype(object)), learner().fit(X, y))


def test_19_memory_of_a_large_fit():
    """At most 300 MiB beyond the input, and an output's worth in predict; int8 is never made float."""
    assert "100,000 samples of 16 tokens stay under 300 MiB" in " ".join(
        MultiHeadAttentionLearner.__doc__.split()
    )
    sampler = BooleanAttentionSampler(2, 16, 4, n_outputs=1, random_state=0)
    X, y = sampler.sample(100_000, as_tokens=True)
    assert X.dtype == np.int8
    tracemalloc.start()
    try:
        model = learner(n_tokens=None).fit(X, y)
        of_fit = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        predicted = model.predict(X)
        of_predict = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert head_recovery_error(sampler.layer_, model.layer_) < EXACT
    assert of_fit < 300 * 2**20
    assert of_predict < predicted.nbytes + 32 * 2**20


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_20_zeros_and_ones_are_zeros_and_ones(deep, fit_intercept):
    """A bool or 0/1 token counts as 0.0 or 1.0: the layer found is the one that acts on those."""
    X, _, truth = deep
    bits = X > 0
    y = truth.predict(bits.astype(np.float64))
    assert np.abs(y - truth.predict(X)).max() > 0.1
    for tokens in (bits, bits.astype(np.int8), bits.astype(np.float64)):
        model = learner(fit_intercept=fit_intercept).fit(tokens, y)
        assert head_recovery_error(truth, model.layer_) < EXACT
        np.testing.assert_allclose(model.predict(bits), y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_21_data_frames_in_and_out_of_pipelines(flat, library):
    X, y, _ = flat
    names = [f"column{index}" for index in range(K * D)]
    make_frame = pd.DataFrame if library == "pandas" else pl.DataFrame
    frame = make_frame(dict(zip(names, X.T.astype(np.float64), strict=True)))
    labels = make_frame({f"label{index}": y[:, index] for index in range(y.shape[1])})
    expected = make_pipeline(MinMaxScaler(), learner()).fit(X, y).predict(X)
    previous = {"transform_output": "default"}
    try:
        set_config(transform_output=library)
        pipeline = make_pipeline(MinMaxScaler(), learner()).fit(frame, labels)
        assert list(pipeline[-1].feature_names_in_) == names
        np.testing.assert_array_equal(pipeline.predict(frame), expected)
        assert pipeline.score(frame, labels) > 1 - 1e-12
    finally:
        set_config(**previous)
    alone = learner().fit(frame, labels)
    np.testing.assert_array_equal(alone.predict(frame), learner().fit(X, y).predict(X))


def test_22_random_states(deep):
    X, y, _ = deep
    seeded = learner(random_state=3).fit(X, y)
    same(learner(random_state=np.int64(3)).fit(X, y), seeded)
    for make in (np.random.RandomState, np.random.default_rng):
        same(learner(random_state=make(3)).fit(X, y), learner(random_state=make(3)).fit(X, y))
        # One that is shared is advanced, so the second fit is another one.
        shared = make(3)
        one, two = (learner(polish=False, span="moments", random_state=shared).fit(X, y) for _ in range(2))
        assert (one.attention_matrices_ != two.attention_matrices_).any()
    assert learner(random_state=None).fit(X, y).score(X, y) > 1 - 1e-12
    for value in ("3", np.random):
        with pytest.raises(ValueError, match="'random_state' parameter"):
            learner(random_state=value).fit(X, y)


@pytest.mark.parametrize("scale", [1e8, 1e-8])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_23_scaled_tokens_and_labels_scale_the_parameters(deep, scale, fit_intercept):
    X, y, truth = deep
    model = learner(fit_intercept=fit_intercept).fit(X * scale, y)
    wanted = AttentionLayer(truth.attention / scale**2, truth.projection / scale)
    assert head_recovery_error(wanted, model.layer_) < EXACT
    model = learner(fit_intercept=fit_intercept).fit(X, y * scale)
    wanted = AttentionLayer(truth.attention, truth.projection * scale)
    assert head_recovery_error(wanted, model.layer_) < EXACT
    assert np.abs(model.intercept_).max() < 1e-9 * scale
    shifted = learner().fit(X.astype(np.float64) + 100.0, y)
    np.testing.assert_allclose(shifted.predict(X + 100.0), y, rtol=0, atol=1e-8)


def raises(problem):
    raise cp.error.SolverError("no factorisation")


def returns_nothing(problem):
    for variable in problem.variables():
        variable.save_value(None)


def misses_the_rows(problem):
    for variable in problem.variables():
        variable.save_value(0.5 * variable.value)


UNREACHABLE = {"tol_gap_abs": 1e-30, "tol_gap_rel": 1e-30, "tol_feas": 1e-30, "tol_ktratio": 1e-30}


@pytest.mark.parametrize(
    "after, options",
    [
        pytest.param(raises, {}, id="raises"),
        pytest.param(None, {"max_iter": 2}, id="stops at a limit"),
        pytest.param(None, UNREACHABLE, id="is inaccurate"),
        pytest.param(returns_nothing, {}, id="returns nothing"),
        pytest.param(misses_the_rows, {}, id="misses the rows"),
    ],
)
def test_24_a_convex_solver_that_fails(monkeypatch, caplog, after, options):
    """The program names its stage and a remedy and chains the cause; the fit falls back and is exact."""
    sampler = BooleanAttentionSampler(2, K, 5, n_outputs=6, attention_scale=8.0, random_state=0)
    X, y = sampler.sample(600, as_tokens=True)
    original, calls = cp.Problem.solve, []

    def solve(self, **given):
        calls.append(self)
        original(self, **{**given, **options})
        if after is not None:
            after(self)

    monkeypatch.setattr(cp.Problem, "solve", solve)
    with caplog.at_level(logging.INFO, logger="sklearn_mhal"):
        model = learner().fit(X, y)
    assert calls
    assert "sculpt: the " in caplog.text
    for told in (caplog.text, model.stages_["sculpt"].message):
        assert "The centre of the ellipsoid is used instead." in told
    assert head_recovery_error(sampler.layer_, model.layer_) < EXACT
    body = model.stages_["sculpt"].body
    with pytest.raises(ConvexProgramError, match=r"^sculpt: .*; needed .*\. \w+") as caught:
        body.minimum_norm_point()
    assert caught.value.stage == "sculpt"
    assert len(caught.value.remedy) > 20
    if after is raises:
        assert isinstance(caught.value.__cause__, cp.error.SolverError)


def test_25_duplicated_samples(deep):
    X, y, truth = deep
    model = learner(n_heads="auto").fit(np.tile(X, (3, 1, 1)), np.tile(y, (3, 1, 1)))
    assert head_recovery_error(truth, model.layer_) < EXACT


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_25_duplicated_and_constant_columns(deep, fit_intercept):
    """Copies of a column are told apart by nothing: the fit is exact, the certificate says so."""
    X, y, _ = deep
    for extra in (X, np.full_like(X, 2)) if fit_intercept else (X,):
        wide = np.concatenate([X, extra], axis=2)
        model = learner(n_heads="auto", fit_intercept=fit_intercept).fit(wide, y)
        assert model.n_heads_ == 2
        np.testing.assert_allclose(model.predict(wide), y, rtol=0, atol=1e-9)
        assert not model.certificate_.identified


def test_25_too_few_samples(deep):
    X, y, _ = deep
    for n in (1, 2, 11):
        with pytest.warns(ConvergenceWarning, match=f"not identifiable: {n} distinct samples"):
            model = learner(heads_starts=2, max_iter=20).fit(X[:n], y[:n])
        assert np.isfinite(model.predict(X)).all()
        assert not model.certificate_.identified


@pytest.mark.parametrize("which", ["attention", "projection"])
def test_25_low_rank_truth(which):
    rng = np.random.default_rng(0)
    attention, projection = rng.standard_normal((2, D, D)) * 0.4, rng.standard_normal((2, D, D_OUT))
    if which == "attention":
        attention = attention[:, :, :1] * attention[:, :1, :] * 4
    else:
        projection = projection[:, :, :1] * projection[:, :1, :]
    truth = AttentionLayer(attention, projection)
    X = rng.choice([-1.0, 1.0], size=(400, K, D))
    model = learner(n_heads="auto").fit(X, truth.predict(X))
    assert head_recovery_error(truth, model.layer_) < EXACT


def test_25_equal_and_constant_tokens(deep):
    X, y, _ = deep
    for tokens in (X[:, [0, 0, 0]], np.full_like(X, 2), np.zeros_like(X)):
        model = learner(n_heads=1).fit(tokens, y)
        assert np.isfinite(model.predict(tokens)).all()
        assert not model.certificate_.identified


def test_26_a_program_called_solved_with_a_large_residual(monkeypatch):
    """Ours is quadratic; no linear one is left."""
    rng = np.random.default_rng(9)
    rows = rng.standard_normal((30, 6))
    margins = rows @ rng.standard_normal(6) - 0.1
    honest = minimum_norm_point(halfspaces=(rows, margins))
    assert honest.status == "optimal" and honest.violation <= 1e-6
    original = cp.Problem.solve

    def solve(self, **given):
        original(self, **given)
        for variable in self.variables():
            # On the sphere through the answer the objective stays what it was: only the rows can tell.
            sideways = linalg.null_space(variable.value[None])[:, 0] * linalg.norm(variable.value)
            variable.save_value(np.cos(0.1) * variable.value + np.sin(0.1) * sideways)

    monkeypatch.setattr(cp.Problem, "solve", solve)
    with pytest.raises(ConvexProgramError, match="called optimal misses a row of unit norm by"):
        minimum_norm_point(halfspaces=(rows, margins))


def test_27_margins_from_tiny_to_huge_in_one_body(deep):
    """Each row is judged on its own scale, by the program and by the body's membership oracle."""
    rng = np.random.default_rng(0)
    normals = rng.standard_normal((40, D))
    inner = rng.standard_normal(D)
    normals *= np.sign(normals @ inner)[:, None]
    # A point with all margins met exactly, from 1e-6 to 1e6 in one body.
    margins = np.geomspace(1e-6, 1e6, 40)
    normals *= (margins / (normals @ inner))[:, None]
    result = minimum_norm_point(halfspaces=(normals, margins))
    assert ((normals @ result.point - margins) / margins).min() > -1e-6
    # One small row turned round leaves nothing, however large the other margins are.
    contradiction = np.concatenate([normals, -normals[:1]])
    with pytest.raises(ConvexProgramError):
        minimum_norm_point(halfspaces=(contradiction, np.append(margins, margins[0])))
    sculpted = learner().fit(deep[0], deep[1]).stages_["sculpt"].body
    body = ConvexBody(
        units=sculpted.units,
        centre=np.zeros(D * (D + 1)),
        eigenvalues=np.zeros(D * (D + 1)),
        eigenvectors=np.eye(D * (D + 1)),
        slack=1.0,
        queries=np.tile(np.eye(D + 1)[:1], (40, 1)),
        gaps=normals,
        margins=margins,
    )
    point = np.zeros((D + 1, D))
    point[0] = inner * (1 + 1e-12)
    assert body.violation(point.ravel()) <= 1.0
    for row in (0, 20, 39):
        # Now only this row is missed, by a thousandth of its own margin.
        missed = body.margins.copy()
        missed[row] *= 1.001
        stricter = replace(body, margins=missed)
        assert not stricter.violation(point.ravel()) <= 1.0
        assert not stricter.inside(point.ravel()[None])[0]


@pytest.mark.parametrize(
    "data, settings, certified",
    [
        pytest.param({}, {}, (True, True), id="certified"),
        pytest.param({"noise_std": 1.5}, {}, (False, True), id="certified by many only"),
        pytest.param({"attention_scale": 1.0}, {"n_heads": "auto"}, (True, True), id="counted"),
        # Three unknowns more than a hundred samples have equations: no standard errors.
        pytest.param({"n_outputs": 1, "n_features": 6}, {"readout": "mean"}, (False, False), id="mean"),
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_28_the_size_of_a_pickle_does_not_depend_on_the_number_of_samples(data, settings, certified):
    """Whatever few samples cannot say: a file's size tells nothing of their number."""
    sizes, bodies = [], []
    for n in (100, 100_000):
        sampler = BooleanAttentionSampler(
            **{"n_tokens": K, "n_features": 5, "n_outputs": 6, "random_state": 1} | data
        )
        X, y = sampler.sample(n, as_tokens=True)
        model = learner(**settings).fit(X, y.mean(axis=1) if settings.get("readout") == "mean" else y)
        saved = pickle.dumps(model)
        sizes.append(len(saved))
        bodies.append(model.stages_["sculpt"].body is not None)
        # What makes up for the rest is dropped on the way back.
        copy = pickle.loads(saved)
        assert vars(copy).keys() == vars(model).keys()
        for name, stage in copy.stages_.items():
            assert vars(stage).keys() == vars(model.stages_[name]).keys()
        assert repr(copy.stages_) == repr(model.stages_)
    assert tuple(bodies) == certified
    assert abs(sizes[1] / sizes[0] - 1) < 0.01


def test_29_weights_are_routed_through_a_pipeline(flat):
    X, y, truth = flat
    weights = (np.arange(N) % 3 > 0).astype(float)
    spoilt = np.where(weights[:, None] == 0, 50.0, y)
    with config_context(enable_metadata_routing=True):
        model = learner().set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        pipeline = make_pipeline(FunctionTransformer(), model).fit(X, spoilt, sample_weight=weights)
        assert head_recovery_error(truth, pipeline[-1].layer_) < EXACT
        assert pipeline.score(X, spoilt, sample_weight=weights) > 1 - 1e-12


class TestDegenerateLayers:
    """Behaviour 30: the number of heads misstated, or heads that data cannot tell."""

    rng = np.random.default_rng(0)
    attention = rng.standard_normal((2, D, D)) * 0.4
    projection = rng.standard_normal((2, D, D_OUT))
    X = rng.choice([-1.0, 1.0], size=(400, K, D))

    def fit(self, truth, **settings):
        y = truth.predict(self.X)
        model = learner(**settings).fit(self.X, y)
        assert np.isfinite(model.predict(self.X)).all()
        return model, model.score(self.X, y)

    @pytest.mark.filterwarnings("ignore:.*polish:sklearn.exceptions.ConvergenceWarning")
    def test_30_too_many_heads_fit_and_are_not_certain(self):
        model, score = self.fit(AttentionLayer(self.attention, self.projection), n_heads=3, max_iter=20)
        assert model.n_heads_ == 3
        assert score > 1 - 1e-7
        assert not model.certificate_.identified

    def test_30_too_few_heads_give_the_best_fit_with_that_many(self):
        model, score = self.fit(AttentionLayer(self.attention, self.projection), n_heads=1)
        assert model.n_heads_ == 1
        assert 0.5 < score < 0.99
        assert not model.certificate_.identified

    def test_30_equal_heads_are_one(self):
        model, score = self.fit(AttentionLayer(self.attention[[0, 0]], self.projection), n_heads="auto")
        merged = AttentionLayer(self.attention[:1], self.projection.sum(axis=0, keepdims=True))
        assert head_recovery_error(merged, model.layer_) < EXACT
        assert score > 1 - 1e-12

    def test_30_a_zero_head_is_none(self):
        projection = self.projection * np.array([1.0, 0.0])[:, None, None]
        model, _ = self.fit(AttentionLayer(self.attention, projection), n_heads="auto")
        seen = AttentionLayer(self.attention[:1], projection[:1])
        assert head_recovery_error(seen, model.layer_) < EXACT

    @pytest.mark.parametrize("which", ["equal", "zero"])
    def test_30_heads_that_cannot_be_told_are_not_certain(self, which):
        attention = self.attention[[0, 0]] if which == "equal" else self.attention
        factor = np.array([1.0, 1.0 if which == "equal" else 0.0])[:, None, None]
        model, score = self.fit(AttentionLayer(attention, self.projection * factor), max_iter=20)
        assert model.n_heads_ == 2
        assert score > 1 - 1e-7
        assert not model.certificate_.identified

    def test_30_projections_that_sum_to_zero(self):
        truth = AttentionLayer(self.attention, self.projection[[0, 0]] * np.array([1.0, -1.0])[:, None, None])
        model, _ = self.fit(truth, n_heads="auto")
        assert head_recovery_error(truth, model.layer_) < EXACT

    def test_30_attention_zero_is_the_mean_token(self):
        model, score = self.fit(AttentionLayer(0 * self.attention, self.projection), n_heads="auto")
        assert model.n_heads_ == 1
        assert np.abs(model.attention_matrices_).max() < 1e-9
        assert score > 1 - 1e-12


def test_31_huge_attention_overflows_nowhere(deep):
    X, _, truth = deep
    huge = AttentionLayer(truth.attention * 1e4, truth.projection)
    y = huge.predict(X)
    patterns = huge.attention_weights(X)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(patterns.sum(axis=3), 1.0, rtol=1e-12)
    sampled = BooleanAttentionSampler(2, K, D, attention_scale=1e4, random_state=0).sample(50)[1]
    assert np.isfinite(sampled).all()
    # Choices this hard show only their signs: the best fit found is finite, and not called certain.
    model = learner(alpha=1e-6, heads_starts=2, max_iter=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    assert model.score(X, y) > 0.8
    assert not model.certificate_.identified


def test_32_scaled_boolean_tokens_with_constant_columns(deep):
    X, y, _ = deep
    wide = np.concatenate([X, np.ones_like(X[:, :, :2]), -np.ones_like(X[:, :, :1])], axis=2)
    columns = wide.reshape(N, -1)
    pipeline = make_pipeline(StandardScaler(), learner()).fit(columns, y.reshape(N, -1))
    assert np.isfinite(pipeline.predict(columns)).all()
    # Each column has its own mean and scale, so not quite a layer any more.
    assert pipeline.score(columns, y.reshape(N, -1)) > 0.9
    scores = cross_val_score(pipeline, columns, y.reshape(N, -1), cv=KFold(2), error_score="raise")
    assert scores.min() > 0.9


@pytest.mark.parametrize(
    "seam",
    [
        "check_training_set",
        "make_examples",
        "estimate_crude_sum",
        "refine_sum",
        "sculpt",
        "estimate_span",
        "find_heads",
        "polish",
        "certify",
        "estimate_uncertainty",
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_33_an_interrupted_fit_leaves_the_estimator_unfitted_and_usable(deep, monkeypatch, seam, again):
    X, y, truth = deep
    model = learner()
    if again:
        model.fit(X, y)
    before = model.get_params()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sklearn_mhal.learner, seam, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, y)
    assert not [name for name in vars(model) if name.endswith("_")]
    with pytest.raises(NotFittedError):
        model.predict(X)
    assert model.get_params() == before
    assert head_recovery_error(truth, model.fit(X, y).layer_) < EXACT


def test_33_an_interrupt_inside_a_stage(deep, monkeypatch):
    """Ctrl-C comes from anywhere: here from the middle of the solver, in the third evaluation."""
    X, y, _ = deep
    from sklearn_mhal import _problem

    original, calls = _problem.Problem.evaluate, []

    def evaluate(self, attention):
        calls.append(attention)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, attention)

    monkeypatch.setattr(_problem.Problem, "evaluate", evaluate)
    model = learner()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)
    assert model.fit(X, y).score(X, y) > 1 - 1e-12
