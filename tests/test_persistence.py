"""Saving and moving: what a file holds, how large it is, and that another process reads it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import joblib
import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mhal import MultiHeadAttentionLearner, TokenPositionEncoder, make_boolean_attention

# Everything of this package that a fitted learner is made of: all that a reader has to trust.
TRUSTED = {
    "sklearn_mhal._report.Stages",
    "sklearn_mhal._tokens.Layout",
    "sklearn_mhal._units.Units",
    "sklearn_mhal.layer.AttentionLayer",
    "sklearn_mhal.learner.MultiHeadAttentionLearner",
    "sklearn_mhal.stages._body.ConvexBody",
    "sklearn_mhal.stages.certify.Certificate",
    "sklearn_mhal.stages.crude_sum.CrudeSum",
    "sklearn_mhal.stages.heads.Heads",
    "sklearn_mhal.stages.polish.Polish",
    "sklearn_mhal.stages.refine_sum.RefinedSum",
    "sklearn_mhal.stages.sculpt.Sculpture",
    "sklearn_mhal.stages.span.Frame",
    "sklearn_mhal.stages.span.Span",
}


def fit(n_samples, **settings):
    # More outputs than tokens: rows are certified, and there is a body to save.
    X, y = make_boolean_attention(
        n_samples, n_heads=2, n_tokens=3, n_features=5, attention_scale=1.0, random_state=0
    )
    return MultiHeadAttentionLearner(2, n_tokens=3, random_state=0, **settings).fit(X, y), X


@pytest.fixture(scope="module")
def fitted():
    learner, X = fit(400)
    assert learner.stages_["sculpt"].body is not None
    return learner, X


def assert_same(copy, learner, X):
    np.testing.assert_array_equal(copy.predict(X), learner.predict(X))
    np.testing.assert_array_equal(copy.attention_weights(X), learner.attention_weights(X))
    assert repr(copy.stages_) == repr(learner.stages_)
    assert copy.certificate_.verdict == learner.certificate_.verdict
    assert copy.get_params() == learner.get_params()
    truth = learner.attention_matrices_[0]
    assert copy.stages_["sculpt"].body.contains(truth) == learner.stages_["sculpt"].body.contains(truth)


def test_skops(fitted):
    skops = pytest.importorskip("skops.io")
    learner, X = fitted
    saved = skops.dumps(learner)
    unknown = skops.get_untrusted_types(data=saved)
    assert set(unknown) == TRUSTED
    assert_same(skops.loads(saved, trusted=unknown), learner, X)


def test_skops_refuses_without_trust(fitted):
    skops = pytest.importorskip("skops.io")
    exceptions = pytest.importorskip("skops.io.exceptions")
    with pytest.raises(exceptions.UntrustedTypesFoundException, match="MultiHeadAttentionLearner"):
        skops.loads(skops.dumps(fitted[0]))


def test_skops_of_a_pipeline(fitted):
    skops = pytest.importorskip("skops.io")
    _, X = fitted
    pipeline = make_pipeline(
        StandardScaler(),
        TokenPositionEncoder(3, encoding="ramp"),
        MultiHeadAttentionLearner(1, n_tokens=3, readout="mean", alpha=0.1, random_state=0),
    ).fit(X, X[:, 0])
    saved = skops.dumps(pipeline)
    unknown = skops.get_untrusted_types(data=saved)
    assert set(unknown) <= TRUSTED | {"sklearn_mhal.encoding.TokenPositionEncoder"}
    np.testing.assert_array_equal(skops.loads(saved, trusted=unknown).predict(X), pipeline.predict(X))


@pytest.mark.parametrize("n_samples", [2000, 30_000])
def test_sizes_do_not_depend_on_the_number_of_samples(fitted, tmp_path, n_samples):
    sizes = []
    for learner in (fitted[0], fit(n_samples)[0]):
        joblib.dump(learner, tmp_path / "learner.joblib")
        sizes.append((len(pickle.dumps(learner)), (tmp_path / "learner.joblib").stat().st_size))
    # Messages hold numbers of samples, which have more digits or fewer.
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.01)


@pytest.mark.parametrize("kind", ["pickle", "joblib", "skops"])
def test_another_process_reads_it(fitted, tmp_path, kind):
    learner, X = fitted
    np.save(tmp_path / "X.npy", X)
    if kind == "skops":
        skops = pytest.importorskip("skops.io")
        skops.dump(learner, tmp_path / "learner")
        load = f"import skops.io; learner = skops.io.load('learner', trusted={sorted(TRUSTED)})"
    elif kind == "joblib":
        joblib.dump(learner, tmp_path / "learner")
        load = "import joblib; learner = joblib.load('learner')"
    else:
        (tmp_path / "learner").write_bytes(pickle.dumps(learner))
        load = "import pickle; learner = pickle.load(open('learner', 'rb'))"
    code = (
        f"import os, sys; sys.path.insert(0, os.getcwd()); os.chdir({str(tmp_path)!r}); {load}; "
        "import numpy as np; np.save('y.npy', learner.predict(np.load('X.npy')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), learner.predict(X))


def test_what_was_read_can_be_fitted_again(fitted):
    learner, X = fitted
    copy = pickle.loads(pickle.dumps(learner))
    y = learner.predict(X)
    np.testing.assert_array_equal(copy.fit(X, y).attention_matrices_, learner.fit(X, y).attention_matrices_)
