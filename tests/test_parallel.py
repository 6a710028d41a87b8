"""Jobs inside jobs: they end, and the scores are those of one job."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Small chunks, so that passes over the samples are handed to threads in every job.
SCRIPT = """
import json, sys
from sklearn import config_context
from sklearn.callback import ProgressBar, ScoringMonitor
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn_mhal import MultiHeadAttentionLearner, TokenPositionEncoder, make_boolean_attention

if __name__ == "__main__":
    X, y = make_boolean_attention(3000, n_heads=2, n_tokens=3, n_features=4, noise_std=0.1, random_state=0)
    grid = {"multiheadattentionlearner__n_heads": [1, 2]}
    scores = []
    with config_context(working_memory=1):
        for n_jobs in (1, 2):
            learner = MultiHeadAttentionLearner(n_tokens=3, n_jobs=n_jobs, random_state=0)
            pipeline = make_pipeline(StandardScaler(), TokenPositionEncoder(3, encoding="ramp"), learner)
            search = GridSearchCV(pipeline, grid, cv=2, n_jobs=n_jobs, error_score="raise")
            bar = "bar" in sys.argv
            callback = ProgressBar(max_propagation_depth=2) if bar else ScoringMonitor(scoring="r2")
            search.set_callbacks(callback).fit(X, y)
            scores.append(list(search.cv_results_["mean_test_score"]) + [search.score(X, y)])
            # The callbacks of a fitted search do not stand in the way of another one.
            search.set_params(n_jobs=2).fit(X, y)
            scores.append(list(search.cv_results_["mean_test_score"]) + [search.score(X, y)])
    print("scores", json.dumps(scores), file=sys.stderr)
"""


@pytest.mark.parametrize("callback", ["bar", "monitor"])
def test_search_with_callbacks_and_jobs_inside_jobs(tmp_path, callback):
    if callback == "bar":
        pytest.importorskip("rich")
    script = tmp_path / "nested.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    # Alone it takes seconds: what has not ended by then hangs.
    done = subprocess.run(
        [sys.executable, str(script), callback],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("scores ")]
    first, *others = json.loads(line.removeprefix("scores "))
    assert len(others) == 3 and all(other == first for other in others)
    assert first[1] > first[0]
