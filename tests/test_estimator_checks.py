"""scikit-learn's own checks: as it comes, and with every check running through attention.

No check is expected to fail. Columns as tokens are the only tokens that every check's input has; a
label that hangs on one certain column is out of their reach, which their tag ``poor_score`` says.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner

ATTENTION = [
    dict(readout="mean"),
    dict(readout="first"),
    dict(readout="first", n_heads=2),
    dict(readout="mean", n_heads=2, fit_intercept=False),
]


def through_attention(**settings):
    return MultiHeadAttentionLearner(n_tokens="features", **settings)


# The labels of the checks are noise, and the best attention to noise is often a hard choice, with
# infinite matrices. A penalty keeps it finite, so that no fit has anything to warn of.
DEFAULT = [MultiHeadAttentionLearner()]
PENALISED = [through_attention(alpha=0.01, **one) for one in ATTENTION]
PLAIN = [through_attention(**one) for one in ATTENTION]


@parametrize_with_checks(DEFAULT)
def test_default(estimator, check):
    check(estimator)


@parametrize_with_checks(PENALISED)
def test_through_attention(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings(
    # As in scikit-learn's own suite. Without a penalty the warning is right: see above.
    f"ignore::{ConvergenceWarning.__module__}.{ConvergenceWarning.__name__}"
)
@parametrize_with_checks(PLAIN)
def test_through_attention_without_penalty(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimators", [DEFAULT, PENALISED, PLAIN], ids=["default", "penalised", "plain"])
def test_sixty_checks_are_collected_and_none_is_expected_to_fail(estimators):
    collected = list(parametrize_with_checks(estimators).mark.args[1])
    # A check that is expected to fail comes as a pytest.param with a mark instead.
    assert all(type(pair) is tuple for pair in collected)
    counts = Counter(str(estimator) for estimator, _ in collected)
    assert len(counts) == len(estimators)
    assert min(counts.values()) >= 60


@pytest.mark.parametrize("settings", ATTENTION)
def test_columns_as_tokens_are_attended_to(settings):
    """The configurations above mean what they say."""
    X = np.random.default_rng(0).standard_normal((60, 4))
    outputs = AttentionLayer([[[1.0]]], [[[1.0]]]).predict(X[:, :, None])[:, :, 0]
    y = outputs[:, 0] if settings["readout"] == "first" else outputs.mean(axis=1)
    estimator = through_attention(alpha=1e-4, random_state=0, **settings).fit(X, y)
    assert estimator.n_tokens_ == 4
    uniform = 1.0 / 4.0
    assert np.abs(estimator.attention_weights(X) - uniform).max() > 0.1


ARRAY_API = """
import pickle, sys, warnings
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_array_api_input
for estimator in pickle.load(sys.stdin.buffer):
    with warnings.catch_warnings():
        if not estimator.alpha:
            warnings.simplefilter("ignore", ConvergenceWarning)
        check_array_api_input("Learner", estimator, array_namespace="numpy", expect_only_array_outputs=False)
    print("passed", estimator)
"""


def test_array_api_check_of_every_configuration():
    """The one check that pytest skips above: it needs a setting from before scipy's import."""
    estimators = [*DEFAULT, *PENALISED, *PLAIN]
    environment = os.environ | {"SCIPY_ARRAY_API": "1"}
    command = [sys.executable, "-W", "error", "-c", ARRAY_API]
    given = pickle.dumps(estimators)
    done = subprocess.run(command, env=environment, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("passed") == len(estimators)
