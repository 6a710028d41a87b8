"""What the estimator promises for 3-D input, where scikit-learn's checks cannot look."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from sklearn_mhal import (
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)

N, K, D, D_OUT = 300, 3, 6, 4
READOUTS = ["tokens", "first", "mean"]
# A layer read off noise-free samples; the promise of the package is ten digits.
EXACT = 1e-10


def read(y, readout):
    return {"tokens": y, "first": y[:, 0], "mean": y.mean(axis=1)}[readout]


@pytest.fixture(scope="module")
def data():
    sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, random_state=0)
    X, y = sampler.sample(N, as_tokens=True)
    return X, y, sampler.layer_


@pytest.fixture(scope="module")
def fitted(data):
    X, y, _ = data
    return MultiHeadAttentionLearner(random_state=0).fit(X, y)


def learner(**settings):
    return MultiHeadAttentionLearner(2, random_state=0, **settings)


class TestShapes:
    def test_features_are_counted_on_the_last_axis(self, data, fitted):
        assert fitted.n_features_in_ == D
        assert fitted.n_tokens_ == K

    def test_features_of_flat_input_are_its_columns(self, data):
        X, y, _ = data
        flat = learner(n_tokens=K).fit(X.reshape(N, -1), y)
        assert flat.n_features_in_ == K * D
        assert flat.n_tokens_ == K

    def test_attributes(self, data, fitted):
        assert isinstance(fitted.layer_, AttentionLayer)
        assert fitted.n_heads_ == 2
        assert fitted.attention_matrices_.shape == (2, D, D)
        assert fitted.projection_matrices_.shape == (2, D, D_OUT)
        assert fitted.key_bias_.shape == (2, D)
        assert fitted.intercept_.shape == (D_OUT,)
        assert fitted.n_iter_ >= 1
        assert not hasattr(fitted, "feature_names_in_")
        assert fitted.attention_matrices_ is fitted.layer_.attention

    def test_wrong_last_axis(self, data, fitted):
        X, y, _ = data
        for method in (fitted.predict, fitted.attention_weights):
            with pytest.raises(ValueError, match=f"{D - 1} features on its last axis.*expecting {D}"):
                method(X[:, :, 1:])
        with pytest.raises(ValueError, match=f"{D - 1} features on its last axis.*expecting {D}"):
            fitted.score(X[:, :, 1:], y)

    def test_wrong_token_count(self, data, fitted):
        X, y, _ = data
        with pytest.raises(ValueError, match=f"{K - 1} tokens a sample.*fitted with {K} tokens"):
            fitted.predict(X[:, 1:])
        with pytest.raises(ValueError, match=f"{K} tokens a sample, but n_tokens={K + 1}"):
            learner(n_tokens=K + 1).fit(X, y)

    def test_the_layer_itself_takes_any_number_of_tokens(self, data, fitted):
        X, _, truth = data
        np.testing.assert_allclose(fitted.layer_.predict(X[:, 1:]), truth.predict(X[:, 1:]), atol=1e-9)

    def test_flat_and_3d_input_may_be_mixed(self, data, fitted):
        X, y, _ = data
        np.testing.assert_array_equal(fitted.predict(X.reshape(N, -1)), fitted.predict(X))
        flat = learner(n_tokens=K).fit(X.reshape(N, -1), y)
        np.testing.assert_array_equal(flat.predict(X), flat.predict(X.reshape(N, -1)))
        with pytest.raises(ValueError, match=f"X has {K * D - 1} features.*{K} tokens of {D}"):
            fitted.predict(X.reshape(N, -1)[:, 1:])

    def test_flat_and_3d_input_learn_the_same(self, data):
        X, y, _ = data
        flat = learner(n_tokens=K).fit(X.reshape(N, -1), y.reshape(N, -1))
        deep = learner().fit(X, y)
        np.testing.assert_array_equal(flat.attention_matrices_, deep.attention_matrices_)
        np.testing.assert_array_equal(flat.projection_matrices_, deep.projection_matrices_)

    def test_arrays_by_protocol(self, data, fitted):
        """What is no array, and has no shape, but can be made one."""

        class Wrapped:
            def __init__(self, array):
                self.array = array

            def __len__(self):
                return len(self.array)

            def __array__(self, dtype=None, copy=None):
                return np.array(self.array, dtype=dtype)

        X, y, _ = data
        model = MultiHeadAttentionLearner(random_state=0).fit(Wrapped(X), Wrapped(y))
        np.testing.assert_array_equal(model.attention_matrices_, fitted.attention_matrices_)
        np.testing.assert_array_equal(model.predict(Wrapped(X)), fitted.predict(list(X)))

    def test_parameters_set_after_the_fit_wait_for_the_next(self, data):
        X, y, _ = data
        model = learner(n_tokens=K).fit(X.reshape(N, -1), y)
        before = model.predict(X), model.score(X, y)
        model.set_params(readout="mean", n_tokens="features", n_heads=7, fit_intercept=False)
        np.testing.assert_array_equal(model.predict(X), before[0])
        assert model.score(X.reshape(N, -1), y) == before[1]

    def test_refit_on_another_shape(self, data, fitted):
        X, y, _ = data
        again = pickle.loads(pickle.dumps(fitted)).set_params(n_heads=1, n_tokens=1)
        again.fit(X[:, 0], y[:, 0])
        assert (again.n_features_in_, again.n_tokens_) == (D, 1)


class TestLayouts:
    @pytest.mark.parametrize("readout", READOUTS)
    @pytest.mark.parametrize("n_outputs", [1, D_OUT])
    def test_predict_returns_the_layout_of_y(self, readout, n_outputs):
        sampler = BooleanAttentionSampler(2, K, D, n_outputs=n_outputs, random_state=1)
        X, y = sampler.sample(N, as_tokens=True)
        y = read(y, readout)
        layouts = [y.reshape(N, -1)]
        layouts += [y] if readout == "tokens" else [y[:, None]]
        layouts += [y.ravel()] if y.size == N else []
        expected = None
        for labels in layouts:
            model = learner(readout=readout).fit(X, labels)
            predicted = model.predict(X)
            assert predicted.shape == labels.shape
            np.testing.assert_allclose(predicted, labels, atol=1e-8)
            assert model.predict(X[:1]).shape == (1, *labels.shape[1:])
            expected = model.layer_ if expected is None else expected
            np.testing.assert_array_equal(model.layer_.attention, expected.attention)
            np.testing.assert_array_equal(model.layer_.projection, expected.projection)

    def test_tokens_readout_needs_a_block_for_each_token(self, data):
        X, y, _ = data
        with pytest.raises(ValueError, match=r"5 columns.*multiple of 3.*readout='first'"):
            learner().fit(X, y.reshape(N, -1)[:, :5])
        with pytest.raises(ValueError, match=r"1 columns.*multiple of 3"):
            learner().fit(X, y[:, 0, 0])
        with pytest.raises(ValueError, match=r"needs \(n_samples, 3, n_outputs\)"):
            learner().fit(X, y[:, :2])

    @pytest.mark.parametrize("readout", ["first", "mean"])
    def test_one_row_readouts_refuse_a_row_for_each_token(self, data, readout):
        X, y, _ = data
        with pytest.raises(ValueError, match=r"needs \(n_samples, 1, n_outputs\)"):
            learner(readout=readout).fit(X, y)

    def test_lengths_of_X_and_y(self, data):
        X, y, _ = data
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            learner().fit(X, y[1:])


class TestScore:
    @pytest.mark.parametrize("readout", READOUTS)
    def test_r2_of_every_layout(self, data, readout):
        X, y, _ = data
        y = read(y, readout)
        noisy = y + np.random.default_rng(0).standard_normal(y.shape) * y.std()
        model = learner(readout=readout).fit(X, y)
        expected = r2_score(noisy.reshape(N, -1), model.predict(X).reshape(N, -1))
        assert 0.2 < expected < 0.8
        assert model.score(X, noisy) == pytest.approx(expected, abs=1e-14)
        assert model.score(X, noisy.reshape(N, -1)) == pytest.approx(expected, abs=1e-14)
        assert model.score(X, y) > 1 - 1e-12

    def test_y_of_another_width(self, data, fitted):
        X, y, _ = data
        with pytest.raises(ValueError, match=f"predictions have {K * D_OUT} values a sample"):
            fitted.score(X, y[:, :, 1:])


class TestSymmetries:
    def test_permuting_tokens_permutes_outputs(self, data, fitted):
        X, _, _ = data
        permutation = np.array([2, 0, 1])
        moved = fitted.predict(X[:, permutation])
        np.testing.assert_allclose(moved, fitted.predict(X)[:, permutation], rtol=0, atol=1e-13)
        patterns = fitted.attention_weights(X[:, permutation])
        expected = fitted.attention_weights(X)[:, :, permutation][..., permutation]
        np.testing.assert_allclose(patterns, expected, rtol=0, atol=1e-13)

    def test_mean_readout_ignores_the_order_of_tokens(self, data):
        X, y, _ = data
        model = learner(readout="mean").fit(X, y.mean(axis=1))
        np.testing.assert_allclose(model.predict(X[:, ::-1]), model.predict(X), rtol=0, atol=1e-12)

    def test_first_readout_ignores_the_order_of_the_others(self, data):
        X, y, _ = data
        model = learner(readout="first").fit(X, y[:, 0])
        np.testing.assert_allclose(model.predict(X[:, [0, 2, 1]]), model.predict(X), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("noise", [0.0, 0.3])
    @pytest.mark.parametrize("readout, working_memory", [("tokens", 1024), ("first", 0.05), ("mean", 0.05)])
    def test_permuting_samples_changes_nothing(self, readout, noise, working_memory):
        sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, noise_std=noise, random_state=0)
        X, y = sampler.sample(600, as_tokens=True)
        y = read(y, readout)
        order = np.random.default_rng(0).permutation(len(X))
        # In chunks, sums are rounded in another order.
        with config_context(working_memory=working_memory):
            first = learner(readout=readout).fit(X, y)
            second = learner(readout=readout).fit(X[order], y[order])
        for name in ("attention_matrices_", "projection_matrices_", "intercept_"):
            found, expected = getattr(second, name), getattr(first, name)
            scale = np.abs(expected).max() if name != "intercept_" else np.abs(y).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * scale)

    @pytest.mark.parametrize("readout", READOUTS)
    def test_two_fits_give_the_same(self, data, readout):
        X, y, _ = data
        model = MultiHeadAttentionLearner(readout=readout, random_state=7)
        first = model.fit(X, read(y, readout)).attention_matrices_
        second = model.fit(X, read(y, readout)).attention_matrices_
        np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize("seed", [1, 8, 16])
    def test_a_start_that_is_exact_already_has_converged(self, seed):
        """Without noise nothing is left to warn of, also where the search has found all digits before."""
        sampler = BooleanAttentionSampler(2, 3, 4, random_state=seed)
        X, y = sampler.sample(240, as_tokens=True)
        model = MultiHeadAttentionLearner(readout="first", random_state=0).fit(X, y[:, 0])
        assert model.stages_["polish"].converged
        assert head_recovery_error(sampler.layer_, model.layer_) < EXACT

    def test_jobs_do_not_change_the_result(self, data):
        X, y, _ = data
        one = MultiHeadAttentionLearner(random_state=0, n_jobs=1).fit(X, y)
        two = MultiHeadAttentionLearner(random_state=0, n_jobs=2).fit(X, y)
        np.testing.assert_array_equal(one.attention_matrices_, two.attention_matrices_)
        np.testing.assert_array_equal(one.projection_matrices_, two.projection_matrices_)


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float32", "float64", ">f4", "longdouble"])
    def test_tokens_of_any_dtype_learn_the_same(self, data, fitted, dtype):
        X, y, _ = data
        model = MultiHeadAttentionLearner(random_state=0).fit(X.astype(dtype), y)
        np.testing.assert_array_equal(model.attention_matrices_, fitted.attention_matrices_)
        np.testing.assert_array_equal(model.projection_matrices_, fitted.projection_matrices_)
        np.testing.assert_array_equal(model.predict(X.astype(dtype)), fitted.predict(X))

    @pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "float32"])
    def test_bits(self, dtype):
        """Tokens of zeros and ones are what they are in any dtype."""
        sampler = BooleanAttentionSampler(2, K, D, random_state=2)
        bits = sampler.sample(N, as_tokens=True)[0] > 0
        y = sampler.layer_.predict(bits)
        expected = learner().fit(bits.astype(np.float64), y)
        model = learner().fit(bits.astype(dtype), y)
        np.testing.assert_array_equal(model.attention_matrices_, expected.attention_matrices_)
        assert head_recovery_error(sampler.layer_, model.layer_) < EXACT

    def test_labels_of_other_dtypes(self, data):
        X, y, _ = data
        rounded = np.round(8 * y)
        expected = learner().fit(X, rounded)
        for dtype in ("int32", "float32"):
            model = learner().fit(X, rounded.astype(dtype))
            np.testing.assert_array_equal(model.attention_matrices_, expected.attention_matrices_)

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_memory_order(self, data, fitted, order):
        X, y, _ = data
        X, y = np.array(X, order=order), np.array(y, order=order)
        model = MultiHeadAttentionLearner(random_state=0).fit(X, y)
        np.testing.assert_array_equal(model.attention_matrices_, fitted.attention_matrices_)

    def test_views(self, data, fitted):
        X, y, _ = data
        X_wide, y_wide = np.repeat(X, 2, axis=0)[::2], np.repeat(y, 2, axis=2)[:, :, ::2]
        model = MultiHeadAttentionLearner(random_state=0).fit(X_wide, y_wide)
        np.testing.assert_array_equal(model.attention_matrices_, fitted.attention_matrices_)

    def test_data_frames(self, data):
        X, y, truth = data
        columns = [f"token{k}_feature{d}" for k in range(K) for d in range(D)]
        frame = pd.DataFrame(X.reshape(N, -1), columns=columns)
        labels = pd.DataFrame(y.reshape(N, -1))
        model = MultiHeadAttentionLearner(n_tokens=K, random_state=0).fit(frame, labels)
        assert list(model.feature_names_in_) == columns
        assert head_recovery_error(truth, model.layer_) < EXACT
        np.testing.assert_allclose(model.predict(frame), labels, atol=1e-9)

    def test_lists(self, data):
        X, y, truth = data
        model = MultiHeadAttentionLearner(random_state=0).fit(X.tolist(), y.tolist())
        assert head_recovery_error(truth, model.layer_) < EXACT


class TestStages:
    ORDER = ("crude_sum", "sculpt", "refine_sum", "span", "heads", "polish")

    def test_order_and_common_attributes(self, fitted):
        assert tuple(fitted.stages_) == self.ORDER
        for result in fitted.stages_.values():
            assert result.seconds > 0
            assert len(result.message) > 10
            assert result.n_samples >= 1

    def test_what_each_stage_estimated(self, data, fitted):
        stages = fitted.stages_
        assert stages["crude_sum"].total.shape == (D, D_OUT)
        assert stages["refine_sum"].total.shape == (D, D_OUT)
        assert stages["sculpt"].body.contains(np.zeros((D, D))) in (True, False)
        assert stages["span"].basis.shape[1:] == (D, D)
        assert stages["span"].source in ("sculpt", "moments", "none")
        assert isinstance(stages["heads"].layer, AttentionLayer)
        assert 0 <= stages["heads"].held_out_error < 1e-6
        assert stages["polish"].layer is fitted.layer_

    def test_without_polish(self, data):
        X, y, _ = data
        model = learner(polish=False).fit(X, y)
        assert tuple(model.stages_) == self.ORDER[:-1]
        assert model.layer_ is model.stages_["heads"].layer

    @pytest.mark.parametrize("readout", READOUTS)
    def test_without_polish_all_samples_have_their_say(self, data, readout):
        """Labels of noise: the projections' least squares on all samples is no worse than the mean."""
        X, y, _ = data
        noise = np.random.default_rng(0).standard_normal(y.shape)
        noise = read(noise, readout)
        model = learner(polish=False, readout=readout).fit(X, noise)
        assert model.score(X, noise) > 0

    def test_representations(self, fitted):
        text, html = repr(fitted.stages_), fitted.stages_._repr_html_()
        for name in self.ORDER:
            assert name in text
            assert name in html

    def test_mapping(self, fitted):
        assert len(fitted.stages_) == len(self.ORDER)
        assert "heads" in fitted.stages_
        with pytest.raises(KeyError):
            fitted.stages_["nothing"]


class TestTools:
    def test_unfitted(self, data):
        X, y, _ = data
        model = learner()
        for call in (lambda: model.predict(X), lambda: model.attention_weights(X), lambda: model.score(X, y)):
            with pytest.raises(NotFittedError):
                call()

    def test_clone_forgets_the_fit(self, fitted):
        copy = clone(fitted)
        assert copy.get_params() == fitted.get_params()
        assert not [name for name in vars(copy) if name.endswith("_")]

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle(self, data, fitted, protocol):
        X, _, _ = data
        copy = pickle.loads(pickle.dumps(fitted, protocol))
        np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))
        theta = copy.attention_matrices_[0]
        assert copy.stages_["sculpt"].body.contains(theta) == fitted.stages_["sculpt"].body.contains(theta)

    @pytest.mark.parametrize("compress", [0, 3])
    def test_joblib(self, data, fitted, tmp_path, compress):
        X, _, _ = data
        joblib.dump(fitted, tmp_path / "learner.joblib", compress=compress)
        copy = joblib.load(tmp_path / "learner.joblib")
        np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))

    @pytest.mark.parametrize("readout", READOUTS)
    def test_cross_validation_of_tokens(self, data, readout):
        X, y, _ = data
        y = read(y, readout)
        scores = cross_val_score(learner(readout=readout), X, y, cv=KFold(3), error_score="raise")
        assert scores.min() > 0.999999

    def test_cross_val_predict(self, data):
        X, y, _ = data
        predicted = cross_val_predict(learner(), X, y, cv=3)
        np.testing.assert_allclose(predicted, y, atol=1e-8)

    @pytest.mark.parametrize("readout", READOUTS)
    def test_pipeline(self, readout):
        """Bits scaled to zeros and ones are another layer's tokens, with key biases and an intercept."""
        sampler = BooleanAttentionSampler(2, K, D, n_outputs=D_OUT, random_state=0)
        X, y = sampler.sample(400, as_tokens=True)
        pipeline = make_pipeline(
            MinMaxScaler(), MultiHeadAttentionLearner(n_tokens=K, readout=readout, random_state=0)
        )
        labels = read(y, readout).reshape(len(X), -1)
        scores = cross_val_score(pipeline, X.reshape(len(X), -1), labels, cv=3, error_score="raise")
        assert scores.min() > 0.999999

    # More heads than there are have no unique fit, of which the learner warns.
    @pytest.mark.filterwarnings("ignore:.*polish:sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("true_number", [2, 3])
    def test_grid_search_finds_the_number_of_heads(self, true_number):
        sampler = BooleanAttentionSampler(true_number, K, D, n_outputs=D_OUT, random_state=0)
        X, y = sampler.sample(300, as_tokens=True)
        grid = {
            "n_heads": [1, 2, 3],
            "sculpt_fraction": [0.02, 0.1],
            "refine_fraction": [0.005, 0.05],
            "heads_net_points": [16, 64],
        }
        model = MultiHeadAttentionLearner(heads_starts=4, random_state=0)
        search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(X, y)
        assert search.best_params_["n_heads"] == true_number
        assert search.best_estimator_.n_heads_ == true_number
