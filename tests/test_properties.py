"""Whatever is given: a fit at least as good as the mean, or one clear error; no NaN, no bare warning."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, head_recovery_error

QUICK, SLOW = 200, 6000
TOKENS = ["boolean", "bits", "gaussian", "few distinct", "constant", "ramp"]
LABELS = ["layer", "noise", "zero", "constant", "linear", "one column constant", "huge offset"]
HEADS = ["generic", "equal", "zero projection", "cancelling", "zero attention", "hard"]
LAYOUTS = ["C", "F", "strided", "reversed", "read-only"]
SCALES = [1e-8, 1e-3, 1.0, 1e3, 1e8]


@st.composite
def problems(draw):
    """Settings of a learner and examples for it, as a plain dict that prints what failed."""
    return {
        "seed": draw(st.integers(0, 10_000)),
        "n": draw(st.one_of(st.integers(1, 12), st.integers(13, 150))),
        "k": draw(st.integers(1, 5)),
        "d": draw(st.integers(1, 5)),
        "d_out": draw(st.integers(1, 4)),
        "m": draw(st.integers(1, 3)),
        "readout": draw(st.sampled_from(["tokens", "first", "mean"])),
        "tokens": draw(st.sampled_from(TOKENS)),
        "labels": draw(st.sampled_from(LABELS)),
        "heads": draw(st.sampled_from(HEADS)),
        "noise": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "duplicated": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "constant_columns": draw(st.integers(0, 2)),
        "copied_column": draw(st.booleans()),
        "X_scale": draw(st.sampled_from(SCALES)),
        "y_scale": draw(st.sampled_from(SCALES)),
        "X_dtype": draw(st.sampled_from([np.float64, np.float64, np.float32, np.int8, np.bool_])).__name__,
        "y_dtype": draw(st.sampled_from([np.float64, np.float64, np.float32])).__name__,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "flat": draw(st.booleans()),
        "weights": draw(st.sampled_from([None, None, "integers", "uniform", "one sample"])),
        "settings": {
            "n_heads": draw(st.sampled_from(["auto", 1, 2, 3])),
            "fit_intercept": draw(st.sampled_from([True, True, False])),
            "span": draw(st.sampled_from(["auto", "auto", "sculpt", "moments", "oracle"])),
            "alpha": draw(st.sampled_from([0.0, 0.0, 1e-3])),
            "polish": draw(st.sampled_from([True, True, True, False])),
        },
    }


def draw_tokens(case, rng):
    shape = (case["n"], case["k"], case["d"])
    if case["tokens"] == "gaussian":
        X = rng.standard_normal(shape)
    elif case["tokens"] == "few distinct":
        X = rng.standard_normal((3, case["d"]))[rng.integers(3, size=shape[:2])]
    elif case["tokens"] == "constant":
        X = np.ones(shape)
    elif case["tokens"] == "ramp":
        X = np.arange(np.prod(shape), dtype=float).reshape(shape) % 100
    else:
        X = rng.integers(2, size=shape).astype(float)
        X = 2 * X - 1 if case["tokens"] == "boolean" else X
    if case["copied_column"]:
        X[:, :, -1] = X[:, :, 0]
    X[:, :, : min(case["constant_columns"], case["d"] - 1)] = 1.0
    # Some samples, or all of them, are the same one.
    again = rng.random(case["n"]) < case["duplicated"]
    X[again] = X[0]
    return X


def draw_layer(case, rng):
    m, d, d_out = case["m"], case["d"], case["d_out"]
    attention = rng.standard_normal((m, d, d)) / d
    projection = rng.standard_normal((m, d, d_out)) / np.sqrt(d)
    if case["heads"] == "equal":
        attention[:] = attention[0]
    elif case["heads"] == "zero projection":
        projection[0] = 0.0
    elif case["heads"] == "cancelling":
        projection[-1] -= projection.sum(axis=0)
    elif case["heads"] == "zero attention":
        attention[:] = 0.0
    elif case["heads"] == "hard":
        attention *= 1e4
    return AttentionLayer(attention, projection)


def draw_labels(case, X, rng):
    layer = draw_layer(case, rng)
    y = layer.predict(X)
    if case["labels"] == "noise":
        y = rng.standard_normal(y.shape)
    elif case["labels"] == "linear":
        y = X @ layer.projection.sum(axis=0)
    elif case["labels"] == "one column constant":
        y[:, :, 0] = 3.0
    elif case["labels"] == "huge offset":
        y += 1e6
    elif case["labels"] in ("zero", "constant"):
        return np.full(y.shape, 0.0 if case["labels"] == "zero" else 0.1)
    return y + case["noise"] * rng.standard_normal(y.shape)


def laid_out(array, layout):
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1]
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


def draw_weights(case, rng):
    n = case["n"]
    if case["weights"] == "integers":
        weights = rng.integers(0, 3, size=n).astype(float)
        weights[0] = 1.0
        return weights
    if case["weights"] == "uniform":
        return rng.uniform(1e-3, 1.0, size=n)
    if case["weights"] == "one sample":
        return (np.arange(n) == 0).astype(float)
    return None


def build(case):
    """Return a learner, X, y and weights."""
    rng = np.random.default_rng(case["seed"])
    X = draw_tokens(case, rng)
    if case["X_dtype"] in ("int8", "bool"):
        X = np.round(X).clip(-100, 100).astype(case["X_dtype"])
        y = draw_labels(case, X.astype(float), rng)
    else:
        # Labels first: scores of scaled tokens would saturate or vanish.
        y = draw_labels(case, X, rng)
        X = (X * case["X_scale"]).astype(case["X_dtype"])
    y = (y * case["y_scale"]).astype(case["y_dtype"])
    y = {"tokens": y, "first": y[:, 0], "mean": y.mean(axis=1)}[case["readout"]]
    if case["flat"]:
        X, y = X.reshape(case["n"], -1), y.reshape(case["n"], -1)
    learner = MultiHeadAttentionLearner(
        n_tokens=case["k"],
        readout=case["readout"],
        max_heads=3,
        heads_starts=3,
        oracle_rounds=1,
        max_iter=30,
        random_state=0,
        **case["settings"],
    )
    return learner, laid_out(X, case["layout"]), laid_out(y, case["layout"]), draw_weights(case, rng)


def compare_with_the_mean(case, y, predicted, weights):
    """Assert that no output's squared residual exceeds that of its mean, what rounding leaves aside.

    The mean is over samples and label rows, because that is what an intercept can be; without one
    the prediction to beat is zero.
    """
    shape = (case["n"], -1, case["d_out"])
    y, predicted = y.astype(np.float64).reshape(shape), predicted.reshape(shape)
    weights = np.ones(len(y)) if weights is None else weights / weights.max()
    weights = np.broadcast_to(weights[:, None, None], (*y.shape[:2], 1))
    mean = 0.0
    if case["settings"]["fit_intercept"]:
        mean = (weights * y).sum(axis=(0, 1)) / weights.sum()
    power = (weights * (y - mean) ** 2).sum(axis=(0, 1))
    residual = (weights * (y - predicted) ** 2).sum(axis=(0, 1))
    # Labels are known to their own rounding, and arithmetic adds a little to it.
    rounding = weights.sum() * (100 * np.finfo(np.float64).eps * np.abs(y).max(initial=0.0)) ** 2
    assert (residual <= (1 + 1e-6) * power + rounding).all(), (residual / np.maximum(power, 1e-300), power)


def check(case):
    learner, X, y, weights = build(case)
    kept = X.tobytes(), y.tobytes()
    with warnings.catch_warnings():
        # The one warning that a fit may give is ours and says what to do.
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner.fit(X, y, sample_weight=weights)
    predicted = learner.predict(X)
    assert kept == (X.tobytes(), y.tobytes())
    assert predicted.shape == y.shape
    arrays = [predicted, learner.attention_weights(X)]
    arrays += [value for value in vars(learner.layer_).values() if isinstance(value, np.ndarray)]
    assert all(np.isfinite(array).all() for array in arrays)
    assert isinstance(learner.certificate_.verdict, str)
    compare_with_the_mean(case, y, predicted, weights)


def property_test(n_examples):
    return settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@property_test(QUICK)
@given(problems())
def test_at_least_as_good_as_the_mean(case):
    check(case)


@pytest.mark.slow
@property_test(SLOW)
@given(problems())
def test_at_least_as_good_as_the_mean_thousands_of_times(case):
    check(case)


@st.composite
def layers(draw):
    """A layer that examples determine, and units for its tokens and labels."""
    return {
        "seed": draw(st.integers(0, 10_000)),
        "m": draw(st.integers(1, 2)),
        "k": draw(st.integers(2, 4)),
        # Two or three bits make so few distinct tokens that more than one layer can fit.
        "d": draw(st.integers(4, 6)),
        "d_out": draw(st.integers(2, 4)),
        "affine": draw(st.booleans()),
        "X_scale": 10.0 ** draw(st.integers(-8, 8)),
        "y_scale": 10.0 ** draw(st.integers(-8, 8)),
        "X_dtype": draw(st.sampled_from(["float64", "float32", "int8"])),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "flat": draw(st.booleans()),
    }


def check_units(case):
    """The same layer in other units, dtypes and layouts is the same layer."""
    rng = np.random.default_rng(case["seed"])
    m, k, d, d_out = (case[name] for name in ("m", "k", "d", "d_out"))
    attention = 1.5 * rng.standard_normal((m, d, d)) / d
    bias = {"key_bias": 0.3 * rng.standard_normal((m, d)), "intercept": rng.standard_normal(d_out)}
    truth = AttentionLayer(attention, rng.standard_normal((m, d, d_out)), **(bias if case["affine"] else {}))
    X = rng.choice([-1.0, 1.0], size=(300, k, d))
    y = truth.predict(X) * case["y_scale"]
    scale = 1.0 if case["X_dtype"] == "int8" else case["X_scale"]
    X = (X * scale).astype(case["X_dtype"])
    # Single precision rounds the unit itself: what the tokens really are is what counts.
    scale = float(np.abs(X).max())
    expected = AttentionLayer(
        truth.attention / scale**2,
        truth.projection * (case["y_scale"] / scale),
        key_bias=truth.key_bias / scale,
        intercept=truth.intercept * case["y_scale"],
    )
    if case["flat"]:
        X, y = X.reshape(300, -1), y.reshape(300, -1)
    learner = MultiHeadAttentionLearner(n_tokens=k, fit_intercept=case["affine"], max_heads=3, random_state=0)
    learner.fit(laid_out(X, case["layout"]), laid_out(y, case["layout"]))
    assert head_recovery_error(expected, learner.layer_) <= 1e-8
    size = np.abs(y).max()
    np.testing.assert_allclose(learner.predict(X) / size, y / size, atol=1e-10)


@property_test(QUICK // 4)
@given(layers())
def test_units_dtypes_and_layouts_change_nothing(case):
    check_units(case)


@pytest.mark.slow
@property_test(SLOW // 10)
@given(layers())
def test_units_dtypes_and_layouts_change_nothing_hundreds_of_times(case):
    check_units(case)
