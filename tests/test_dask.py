"""A real cluster: worker processes over TCP, the same parameters, data sent once or not at all."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from sklearn_mhal import MultiHeadAttentionLearner, make_boolean_attention
from sklearn_mhal._examples import make_examples
from sklearn_mhal._sums import gradient_all, regress_all

distributed = pytest.importorskip("distributed")
PATH = Path(__file__).parents[1] / "examples" / "learn_on_dask_cluster.py"
# The cluster's own start and end warn now and then: of busy ports, of what is still open.
pytestmark = pytest.mark.filterwarnings("default")
N_HEADS, N_SAMPLES = 2, 60_000


@pytest.fixture(scope="module")
def client():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            distributed.LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=True,
                protocol="tcp://",
                dashboard_address=":0",
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    X, y = make_boolean_attention(
        N_SAMPLES, n_heads=N_HEADS, n_tokens=3, n_features=4, noise_std=0.1, as_tokens=True, random_state=0
    )
    np.save(folder / "tokens.npy", X)
    np.save(folder / "labels.npy", y)
    return X, y, folder


def given_as(form, data):
    X, y, folder = data
    mapped = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "labels")]
    return {"memory": (X, y), "files": mapped, "tokens in a file": (mapped[0], y)}[form]


def sums(X, y, **kwargs):
    examples = make_examples(X, y, fit_intercept=True, random_state=0, **kwargs)
    attention = np.random.default_rng(0).standard_normal((examples.query_width, N_HEADS * X.shape[2]))
    projection, intercept = regress_all(examples, attention, ridge=0.0, n_jobs=None)
    return projection, intercept, *gradient_all(examples, attention, projection, intercept, n_jobs=None)


def addresses(client):
    return set(client.scheduler_info()["workers"])


def test_the_cluster_is_two_processes_over_tcp(client):
    assert len(addresses(client)) == 2
    assert all(address.startswith("tcp://") for address in addresses(client))
    import os

    pids = set(client.run(os.getpid).values())
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize("weighted", [False, True], ids=["all", "weighted"])
@pytest.mark.parametrize("form", ["memory", "files", "tokens in a file"])
def test_sums_have_the_same_bits(client, data, form, weighted):
    X, y = given_as(form, data)
    # Weights of zero leave gaps between the rows of a block.
    weights = {"sample_weight": np.arange(len(X)) % 3.0} if weighted else {}
    expected = sums(X, y, **weights)
    with parallel_config("dask"):
        for mine, theirs in zip(expected, sums(X, y, **weights), strict=True):
            np.testing.assert_array_equal(theirs, mine)


def test_data_in_memory_is_scattered_once_and_forgotten(client, data, monkeypatch):
    X, y, _ = data
    sent = []
    scatter = distributed.Client.scatter

    def counted(self, item, *args, **kwargs):
        if type(item).__name__ == "Block":
            sent.append(item.examples.n_samples)
        return scatter(self, item, *args, **kwargs)

    monkeypatch.setattr(distributed.Client, "scatter", counted)
    with parallel_config("dask"):
        from joblib.parallel import get_active_backend

        sums(X, y)
        # Two passes, and every sample went to the cluster in one of them.
        assert sum(sent) == N_SAMPLES
        assert not get_active_backend()[0].data_futures


def test_files_that_workers_do_not_see(client, data, tmp_path):
    X, y, _ = data
    path = tmp_path / "tokens.npy"
    np.save(path, X)
    mapped = np.load(path, mmap_mode="r")
    expected = sums(X, y)
    # The mapping stays valid here; to the workers it is as if they were on another machine.
    path.unlink()
    with parallel_config("dask"):
        for mine, theirs in zip(expected, sums(mapped, y), strict=True):
            np.testing.assert_array_equal(theirs, mine)


def test_a_fit_is_the_same_and_runs_on_both_workers(client, data):
    X, y = given_as("files", data)
    alone = MultiHeadAttentionLearner(N_HEADS, random_state=0).fit(X, y)

    def ran(dask_worker):
        return dask_worker.state.nbytes, len(dask_worker.state.log), dask_worker.state.transition_counter

    before = client.run(ran)
    with parallel_config("dask"):
        shared = MultiHeadAttentionLearner(N_HEADS, random_state=0).fit(X, y)
    after = client.run(ran)
    assert all(after[worker][2] > before[worker][2] for worker in before)
    for name in ("attention_matrices_", "projection_matrices_", "key_bias_", "intercept_"):
        np.testing.assert_allclose(getattr(shared, name), getattr(alone, name), atol=1e-10, rtol=0.0)


def test_example(client, capsys):
    spec = importlib.util.spec_from_file_location("learn_on_dask_cluster", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # Few samples are no test of memory, whose fixed part then outweighs them: see the script's own run.
    example.main(["--samples", "20000", "--heads", "1", "--features", "4", "--tokens", "3"])
    printed = capsys.readouterr().out
    assert "Learned on 2 workers" in printed
    assert "Largest difference to the fit without a cluster: 0.0e+00" in printed
