"""Every wrong input has one clear error, or a fallback that says what it is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

N, K, D, D_OUT = 200, 3, 6, 4
# Two wordings of scikit-learn's, for arrays of objects and of strings.
NOT_NUMERIC = "could not convert string to float|dtype='numeric' is not compatible"


@pytest.fixture(scope="module")
def data():
    sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, random_state=0)
    X, y = sampler.sample(N, as_tokens=True)
    X, y = X.astype(np.float64), y.copy()
    X.flags.writeable = y.flags.writeable = False
    return X, y


@pytest.fixture(scope="module")
def fitted(data):
    return MultiHeadAttentionLearner(2, random_state=0).fit(*data)


def refused(error, match, X, y, *, sample_weight=None, **settings):
    """Assert the error, and that the refused fit leaves nothing behind."""
    learner = MultiHeadAttentionLearner(**settings)
    before = learner.get_params()
    with pytest.raises(error, match=match):
        learner.fit(X, y, sample_weight=sample_weight)
    assert not [name for name in vars(learner) if name.endswith("_")]
    assert learner.get_params() == before


class TestShapes:
    def test_tokens_that_do_not_divide_the_columns(self, data):
        X, y = data
        refused(ValueError, "n_tokens=4 does not divide the 18 columns", X.reshape(N, -1), y, n_tokens=4)

    def test_wrong_last_axis_in_predict(self, data, fitted):
        X, _ = data
        with pytest.raises(ValueError, match=r"X has 5 features on its last axis.*expecting 6 features"):
            fitted.predict(X[:, :, :5])

    def test_wrong_number_of_columns_in_predict(self, data, fitted):
        X, _ = data
        with pytest.raises(ValueError, match=r"X has 15 features.*expecting 18 features.*3 tokens of 6"):
            fitted.predict(X[:, :, :5].reshape(N, -1))

    def test_one_dimensional_X(self, data, fitted):
        X, y = data
        refused(ValueError, "Reshape your data", X[:, 0, 0], y)
        with pytest.raises(ValueError, match="Reshape your data"):
            fitted.predict(X[0, 0])

    def test_four_dimensional_X_and_y(self, data, fitted):
        X, y = data
        refused(ValueError, "dim 4", X[None], y)
        refused(ValueError, "1, 2 or 3 dimensions", X, y[:, :, :, None])

    def test_no_samples(self, data):
        X, y = data
        refused(ValueError, "0 sample", X[:0], y[:0])

    @pytest.mark.parametrize("empty", [np.s_[:, :0], np.s_[:, :, :0]])
    def test_no_tokens_or_no_features(self, data, empty):
        X, y = data
        refused(ValueError, "minimum of 1 token and 1 feature is required", X[empty], y)

    def test_no_outputs(self, data):
        X, y = data
        refused(ValueError, "y has 0 columns", X, y[:, 0, :0], readout="first")

    def test_missing_y(self, data):
        refused(ValueError, "requires y to be passed", data[0], None)

    def test_columns_as_tokens_of_3d_input(self, data):
        refused(ValueError, "makes tokens of the columns of a 2-D X", *data, n_tokens="features")


class TestValues:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("flat", [False, True])
    def test_not_finite(self, data, fitted, value, flat):
        X, y = (array.copy() for array in data)
        X[3, 1, 2], y[3, 1, 2] = value, value
        n_tokens = K if flat else None
        shape = (N, -1) if flat else X.shape
        message = "Input {} contains " + ("NaN" if np.isnan(value) else "infinity")
        refused(ValueError, message.format("X"), X.reshape(shape), data[1], n_tokens=n_tokens)
        refused(ValueError, message.format("y"), data[0].reshape(shape), y, n_tokens=n_tokens)
        with pytest.raises(ValueError, match=message.format("X")):
            fitted.predict(X.reshape(shape))

    def test_strings_in_X(self, data):
        X, y = data
        words = np.where(X > 0, "yes", "no")
        refused(ValueError, NOT_NUMERIC, words, y)
        refused(ValueError, NOT_NUMERIC, words.reshape(N, -1), y, n_tokens=K)

    @pytest.mark.parametrize("dtype", [str, object])
    def test_strings_in_y(self, data, dtype):
        X, _ = data
        labels = np.where(X[:, 0, 0] > 0, "yes", "no").astype(dtype)
        refused(ValueError, NOT_NUMERIC, X, labels, readout="first")

    def test_complex(self, data):
        X, y = data
        refused(ValueError, "Complex data not supported", X + 1j, y)
        refused(ValueError, "Complex data not supported", X, y + 1j)

    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("dtype", ["datetime64[s]", "timedelta64[s]"])
    def test_times(self, data, fitted, dtype, flat):
        X, y = data
        times = X.astype(int).reshape(N, -1 if flat else K, *([] if flat else [D])).astype(dtype)
        refused(ValueError, "X must be numeric, got dtype", times, y, n_tokens=K)
        refused(ValueError, "y must be numeric, got dtype", X, y.astype(int).astype(dtype))
        with pytest.raises(ValueError, match="X must be numeric, got dtype"):
            fitted.predict(times)

    def test_categories_that_are_words(self, data):
        X, y = data
        frame = pd.DataFrame(X.reshape(N, -1)).rename(columns=str)
        frame["0"] = pd.Categorical(np.where(frame["0"] > 0, "yes", "no"))
        refused(ValueError, NOT_NUMERIC, frame, y, n_tokens=K)

    @pytest.mark.parametrize("flat", [False, True])
    def test_masked_entries(self, data, fitted, flat):
        """A plain array would show what the mask hides; without masked entries there is nothing to hide."""
        X, y = (array.reshape(N, -1) if flat else array for array in data)
        hidden, open_ = (np.ma.masked_array(X, mask=where) for where in (X > 0, np.zeros_like(X)))
        refused(ValueError, "X has masked entries", hidden, y, n_tokens=K)
        refused(ValueError, "y has masked entries", X, np.ma.masked_greater(y, 0.0), n_tokens=K)
        weights = np.ma.masked_less(np.arange(N), 5)
        refused(ValueError, "sample_weight has masked entries", X, y, n_tokens=K, sample_weight=weights)
        for method in (fitted.predict, fitted.attention_weights):
            with pytest.raises(ValueError, match="X has masked entries"):
                method(hidden)
        with pytest.raises(ValueError, match="y has masked entries"):
            fitted.score(X, np.ma.masked_greater(y, 0.0))
        np.testing.assert_array_equal(fitted.predict(open_).ravel(), fitted.predict(X).ravel())

    @pytest.mark.parametrize("scale", [1e60, 1e200, 1e-60, 1e-200])
    def test_units_out_of_reach(self, data, fitted, scale):
        """Attention matrices go with the inverse square of the tokens."""
        X, y = data
        message = "The largest entry of {} is .*Change the unit, so that it lies between"
        refused(ValueError, message.format("X"), X * scale, y)
        refused(ValueError, message.format("X"), (X * scale).reshape(N, -1), y, n_tokens=K)
        if scale > 1:
            refused(ValueError, message.format("y"), X, y * scale)
            with pytest.raises(ValueError, match=message.format("X")):
                fitted.predict(X * scale)
        else:
            assert np.isfinite(fitted.predict(X * scale)).all()

    def test_sparse(self, data):
        from scipy.sparse import csr_array

        X, y = data
        refused(TypeError, "Sparse data was passed", csr_array(X.reshape(N, -1)), y, n_tokens=K)

    def test_columns_of_a_frame_in_another_order(self, data):
        X, y = data
        frame = pd.DataFrame(X.reshape(N, -1)).rename(columns="column {}".format)
        fitted = MultiHeadAttentionLearner(2, n_tokens=K, random_state=0).fit(frame, y)
        with pytest.raises(ValueError, match="Feature names must be in the same order"):
            fitted.predict(frame[frame.columns[::-1]])


class TestWeights:
    def test_negative(self, data):
        refused(ValueError, "Negative values .* `sample_weight`", *data, sample_weight=-np.ones(N))

    def test_all_zero(self, data):
        refused(ValueError, "at least one non-zero number", *data, sample_weight=np.zeros(N))

    def test_wrong_length(self, data):
        refused(ValueError, "sample_weight.shape", *data, sample_weight=np.ones(N - 1))

    def test_not_finite(self, data):
        refused(ValueError, "Input sample_weight contains NaN", *data, sample_weight=np.full(N, np.nan))


OUT_OF_RANGE = {
    "n_heads": [0, -1, 1.5, "many"],
    "n_tokens": [0, 2.0, "columns"],
    "readout": ["last", None],
    "span": ["svd", None],
    "max_heads": [0],
    "stage_samples": [0],
    "refine_fraction": [0.0, 1.1],
    "refine_rounds": [0],
    "sculpt_fraction": [0.0, 1.1],
    "sculpt_interior": [0.0, 0.5],
    "sculpt_vertex": [0.0, 0.5],
    "sculpt_margin": [0.0],
    "sculpt_tolerance": [0.0],
    "oracle_rounds": [0],
    "heads_starts": [0],
    "heads_net_points": [1],
    "heads_max_tuples": [0],
    "polish": ["yes"],
    "alpha": [-1.0],
    "validation_fraction": [0.0, 1.0],
    "tol": [0.0],
    "max_iter": [0, 10.0],
    "fit_intercept": ["no"],
    "n_jobs": [1.5],
    "random_state": ["seed", -1],
}


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_hyperparameter_out_of_range(data, name, value):
    message = f"The '{name}' parameter of MultiHeadAttentionLearner must be"
    refused(ValueError, message, *data, **{name: value})


def test_every_hyperparameter_has_an_error(data):
    """Those without an entry above accept anything that counts as true or false."""
    assert set(MultiHeadAttentionLearner().get_params()) - set(OUT_OF_RANGE) == {"verbose"}


class TestFallbacks:
    @pytest.mark.parametrize("readout", ["tokens", "first", "mean"])
    def test_fewer_samples_than_unknowns(self, data, readout):
        X, y = data
        y = {"tokens": y, "first": y[:, 0], "mean": y.mean(axis=1)}[readout]
        # 2 heads of 6 x (7 + 4) numbers, and 4 of the intercept.
        n = 11 if readout == "tokens" else 33
        message = rf"not identifiable: {n} distinct samples give 132 .* 136 unknowns of 2 heads"
        learner = MultiHeadAttentionLearner(2, readout=readout, heads_starts=2, max_iter=20, random_state=0)
        with pytest.warns(ConvergenceWarning, match=message):
            learner.fit(X[:n], y[:n])
        assert learner.score(X[:n], y[:n]) > 0.9

    def test_many_copies_of_few_samples(self, data):
        X, y = data
        learner = MultiHeadAttentionLearner(2, heads_starts=2, max_iter=20, random_state=0)
        with pytest.warns(ConvergenceWarning, match="not identifiable: 11 distinct samples"):
            learner.fit(np.repeat(X[:11], 50, axis=0), np.repeat(y[:11], 50, axis=0))

    def test_a_penalty_settles_what_the_samples_leave_open(self, data):
        X, y = data
        learner = MultiHeadAttentionLearner(2, alpha=1e-2, heads_starts=2, random_state=0)
        learner.fit(X[:11], y[:11])
        assert np.isfinite(learner.predict(X)).all()

    def test_one_token_is_linear_regression_however_few_samples(self):
        rng = np.random.default_rng(0)
        X, y = rng.standard_normal((5, 8)), rng.standard_normal(5)
        learner = MultiHeadAttentionLearner(random_state=0).fit(X, y)
        np.testing.assert_allclose(learner.predict(X), y, atol=1e-8)

    @pytest.mark.parametrize("n_outputs", [1, K - 1])
    def test_too_few_outputs_to_certify_rows(self, n_outputs):
        """Sculpting needs d_out > k - 1; the moments and random starts take over, and the fit is exact."""
        sampler = BooleanAttentionSampler(2, K, D, n_outputs=n_outputs, random_state=0)
        X, y = sampler.sample(400, as_tokens=True)
        learner = MultiHeadAttentionLearner(random_state=0).fit(X, y)
        sculpture = learner.stages_["sculpt"]
        assert sculpture.body is None
        assert f"n_outputs={n_outputs} must exceed n_tokens - 1 = {K - 1}" in sculpture.message
        assert learner.n_heads_ == 2
        assert head_recovery_error(sampler.layer_, learner.layer_) < 1e-10

    def test_averaged_rows_cannot_be_certified(self, data):
        X, y = data
        learner = MultiHeadAttentionLearner(readout="mean", random_state=0).fit(X, y.mean(axis=1))
        assert learner.stages_["sculpt"].body is None
        assert "averaged" in learner.stages_["sculpt"].message
        assert learner.score(X, y.mean(axis=1)) > 1 - 1e-12

    @pytest.mark.parametrize("span", ["sculpt", "oracle"])
    def test_a_span_source_that_has_nothing_to_say(self, span):
        """The source is asked for by name, and the fit still ends: starts at random take over."""
        sampler = BooleanAttentionSampler(2, K, D, n_outputs=1, random_state=0)
        X, y = sampler.sample(400, as_tokens=True)
        learner = MultiHeadAttentionLearner(2, span=span, random_state=0).fit(X, y)
        assert learner.stages_["span"].source == "none"
        assert f"{span} has nothing to say" in learner.stages_["span"].message
        assert learner.stages_["heads"].source == "random"
        assert head_recovery_error(sampler.layer_, learner.layer_) < 1e-10
