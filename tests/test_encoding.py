"""Positions for tokens: what is appended where, scikit-learn's conventions, and what they are for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.callback import ProgressBar
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, TokenPositionEncoder

ENCODINGS = ["onehot", "sinusoidal", "ramp"]


@parametrize_with_checks([TokenPositionEncoder(encoding=encoding) for encoding in ENCODINGS])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("k, d", [(1, 1), (1, 4), (2, 3), (5, 1), (8, 2)])
def test_each_token_is_followed_by_its_position(encoding, k, d):
    X = np.random.default_rng(0).standard_normal((7, k * d))
    encoder = TokenPositionEncoder(k, encoding=encoding).fit(X)
    p = encoder.positions_.shape[1]
    tokens = encoder.transform(X).reshape(7, k, d + p)
    np.testing.assert_array_equal(tokens[:, :, :d], X.reshape(7, k, d))
    for sample in tokens:
        np.testing.assert_array_equal(sample[:, d:], encoder.positions_)
    assert encoder.n_tokens_ == k
    # No two tokens have the same position.
    assert len(np.unique(encoder.positions_, axis=0)) == k


def test_onehot():
    np.testing.assert_array_equal(TokenPositionEncoder(3).fit(np.zeros((1, 6))).positions_, np.eye(3))


def test_ramp():
    encoder = TokenPositionEncoder(encoding="ramp")
    np.testing.assert_array_equal(encoder.fit(np.zeros((1, 5))).positions_.ravel(), [-1, -0.5, 0, 0.5, 1])
    np.testing.assert_array_equal(encoder.fit(np.zeros((1, 1))).positions_, [[0.0]])


def test_sinusoidal_scores_can_depend_on_the_distance_alone():
    """A bilinear form of two positions that is a combination of cosines of their distance."""
    k = 6
    positions = TokenPositionEncoder(encoding="sinusoidal").fit(np.zeros((1, k))).positions_
    assert positions.shape == (k, 2 * 3)
    distance = np.subtract.outer(np.arange(k), np.arange(k))
    expected = sum(np.cos(np.pi * 2**j * distance / k) for j in range(3))
    # Sines and cosines of angles up to 2 pi k, to rounding.
    np.testing.assert_allclose(positions @ positions.T, expected, atol=1e-13)


@pytest.mark.parametrize("n_frequencies", [1, 2, 5])
def test_number_of_frequencies(n_frequencies):
    encoder = TokenPositionEncoder(4, encoding="sinusoidal", n_frequencies=n_frequencies)
    assert encoder.fit_transform(np.zeros((2, 8))).shape == (2, 4 * (2 + 2 * n_frequencies))


def test_names():
    X = pd.DataFrame(np.zeros((2, 4)), columns=["a", "b", "c", "d"])
    encoder = TokenPositionEncoder(2, encoding="ramp").fit(X)
    names = ["a", "b", "token0_position0", "c", "d", "token1_position0"]
    assert encoder.get_feature_names_out().tolist() == names
    assert encoder.get_feature_names_out(["a", "b", "c", "d"]).tolist() == names
    with pytest.raises(ValueError, match="input_features is not equal to feature_names_in_"):
        encoder.get_feature_names_out(["a", "b", "c", "e"])


@pytest.mark.parametrize("output, frame", [("pandas", pd.DataFrame), ("polars", pl.DataFrame)])
def test_set_output(output, frame):
    X = frame(np.arange(8.0).reshape(2, 4), **({} if frame is pd.DataFrame else {"schema": list("abcd")}))
    if frame is pd.DataFrame:
        X.columns = list("abcd")
    encoder = TokenPositionEncoder(2).set_output(transform=output)
    encoded = encoder.fit_transform(X)
    assert isinstance(encoded, frame)
    assert list(encoded.columns) == encoder.get_feature_names_out().tolist()
    np.testing.assert_array_equal(encoded["c"].to_numpy(), [2.0, 6.0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_keep_their_width(dtype):
    assert TokenPositionEncoder().fit_transform(np.zeros((2, 3), dtype=dtype)).dtype == dtype


def test_integers_and_the_input_are_left_alone():
    X = np.ones((2, 4), dtype=np.int8)
    X.flags.writeable = False
    encoded = TokenPositionEncoder(2).fit_transform(X)
    assert encoded.dtype == np.float64
    assert not np.shares_memory(encoded, X)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (dict(n_tokens=3), ValueError, "n_tokens=3 does not divide the 4 columns"),
        (dict(n_tokens=0), ValueError, "'n_tokens' parameter"),
        (dict(encoding="learned"), ValueError, "'encoding' parameter"),
        (dict(n_frequencies=0), ValueError, "'n_frequencies' parameter"),
    ],
)
def test_wrong_settings(settings, error, message):
    with pytest.raises(error, match=message):
        TokenPositionEncoder(**settings).fit(np.zeros((2, 4)))


def test_another_width_is_refused():
    encoder = TokenPositionEncoder(2).fit(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"X has 6 features.*expecting 4"):
        encoder.transform(np.zeros((2, 6)))


def test_in_a_column_transformer():
    X = pd.DataFrame(np.arange(6.0).reshape(2, 3), columns=["a", "b", "c"])
    encoder = TokenPositionEncoder(2, encoding="ramp")
    both = make_column_transformer((encoder, ["a", "b"]), remainder="passthrough")
    np.testing.assert_array_equal(both.fit_transform(X), [[0, -1, 1, 1, 2], [3, -1, 4, 1, 5]])


@pytest.fixture(scope="module")
def ordered():
    """Labels of a layer that always looks at the second of three tokens' columns."""
    X = np.random.default_rng(0).standard_normal((400, 3))
    attention = np.zeros((1, 4, 4))
    projection = np.zeros((1, 4, 1))
    projection[0, 0, 0] = 2.0
    key_bias = np.array([[0.0, 0.0, 3.0, 0.0]])
    layer = AttentionLayer(attention, projection, key_bias=key_bias)
    encoded = TokenPositionEncoder().fit_transform(X).reshape(-1, 3, 4)
    return X, layer.predict(encoded).mean(axis=1)[:, 0]


def test_order_can_matter(ordered):
    X, y = ordered
    blind = MultiHeadAttentionLearner(1, n_tokens="features", readout="mean", alpha=1e-6, random_state=0)
    assert blind.fit(X, y).score(X, y) < 0.6
    seeing = make_pipeline(StandardScaler(), TokenPositionEncoder(), blind.set_params(n_tokens=3, alpha=1e-8))
    # The penalty's own bias is all that is left.
    assert seeing.fit(X, y).score(X, y) > 0.9999
    weights = seeing[-1].attention_weights(seeing[:-1].transform(X))
    assert weights[:, 0, :, 1].min() > 0.5


def test_in_a_grid_search_with_a_progress_bar(ordered, capsys):
    """Every step of the pipeline supports callbacks, so nothing warns of one that does not."""
    pytest.importorskip("rich")
    X, y = ordered
    learner = MultiHeadAttentionLearner(1, n_tokens=3, readout="mean", alpha=1e-2, random_state=0)
    pipeline = make_pipeline(StandardScaler(), TokenPositionEncoder(), learner)
    grid = {"tokenpositionencoder__encoding": ["onehot", "ramp"]}
    search = GridSearchCV(pipeline, grid, cv=2).set_callbacks(ProgressBar(max_propagation_depth=2))
    assert search.fit(X, y).best_params_ == {"tokenpositionencoder__encoding": "onehot"}
    assert "GridSearchCV - fit" in capsys.readouterr().out


def test_clone_keeps_what_was_given():
    encoder = TokenPositionEncoder(np.int64(2), encoding="ramp")
    assert clone(encoder).get_params() == encoder.get_params()
