"""How much is held beyond the input: little, and hardly more for more samples."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from sklearn import config_context

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

MEBIBYTE = 2**20


def data(n_samples, noise_std=0.0):
    sampler = BooleanAttentionSampler(3, 4, 8, noise_std=noise_std, random_state=0)
    return *sampler.sample(n_samples, as_tokens=True), sampler.layer_


def peak_of(function):
    """Return what a call returns and the most that it held beyond what was there."""
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# 29 MB of input. What a fit without noise holds besides chunks is 41 bytes a sample, for their order and
# while equal ones are looked for; with noise the curvature of 128 times the information limit (11 MB here).
@pytest.mark.parametrize(("noise_std", "mebibytes"), [(0.0, 32), (0.1, 64)])
def test_a_fit_holds_less_than_the_data(noise_std, mebibytes):
    X, y, truth = data(100_000, noise_std)
    learner, peak = peak_of(lambda: MultiHeadAttentionLearner(3, random_state=0).fit(X, y))
    assert head_recovery_error(truth, learner.layer_) < (1e-2 if noise_std else 1e-10)
    assert peak < mebibytes * MEBIBYTE


def test_a_sample_more_takes_bytes_not_rows():
    peaks = {}
    for n_samples in (30_000, 300_000):
        X, y, _ = data(n_samples)
        peaks[n_samples] = peak_of(lambda X=X, y=y: MultiHeadAttentionLearner(3, random_state=0).fit(X, y))[1]
    # A row is 288 bytes as given, 512 as floats.
    assert (peaks[300_000] - peaks[30_000]) / 270_000 < 64


def test_passes_keep_to_the_working_memory():
    X, y, _ = data(20_000)
    learner = MultiHeadAttentionLearner(3, random_state=0).fit(X, y)

    def predict():
        learner.layer_.predict(X)

    peaks = []
    for mebibytes in (1, 8):
        with config_context(working_memory=mebibytes):
            peaks.append(peak_of(predict)[1] - y.nbytes)
    assert peaks[0] < 1.5 * MEBIBYTE
    assert peaks[0] < peaks[1] < 12 * MEBIBYTE


def test_predictions_written_chunk_by_chunk(tmp_path):
    X, y, _ = data(50_000)
    learner = MultiHeadAttentionLearner(3, random_state=0).fit(X, y)
    written = np.lib.format.open_memmap(tmp_path / "y.npy", mode="w+", dtype=y.dtype, shape=y.shape)

    def write():
        for start in range(0, len(X), 5000):
            written[start : start + 5000] = learner.predict(X[start : start + 5000])

    assert peak_of(write)[1] < 16 * MEBIBYTE
    np.testing.assert_array_equal(written, learner.predict(X))


@pytest.mark.parametrize("noise_std", [0.0, 0.1])
def test_a_file_is_read_and_left_as_it_is(tmp_path, noise_std):
    X, y, _ = data(20_000, noise_std)
    expected = MultiHeadAttentionLearner(3, random_state=0).fit(X.astype(np.float64), y)
    np.save(tmp_path / "X.npy", X)
    before = (tmp_path / "X.npy").read_bytes()
    (tmp_path / "X.npy").chmod(0o444)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    learner = MultiHeadAttentionLearner(3, random_state=0).fit(mapped, y)
    for name in ("attention_matrices_", "projection_matrices_", "key_bias_", "intercept_"):
        np.testing.assert_array_equal(getattr(learner, name), getattr(expected, name))
    del mapped
    assert (tmp_path / "X.npy").read_bytes() == before


MILLION = """
import resource, sys, threading, time
import numpy as np
from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

noise_std = float(sys.argv[1])
n_samples, step = 1_000_000, 10_000
sampler = BooleanAttentionSampler(3, 4, 8, noise_std=noise_std, random_state=0)
X, y = sampler.sample(500, as_tokens=True)
MultiHeadAttentionLearner(3, random_state=0).fit(X, y).predict(X)
X = np.empty((n_samples, 4, 8), dtype=np.int8)
y = np.empty((n_samples, 4, 8))
for at in range(0, n_samples, step):
    X[at : at + step], y[at : at + step] = sampler.sample(step, as_tokens=True)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Watch:
    def __enter__(self):
        self.start = self.peak = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self):
        while not self.done.wait(0.002):
            self.peak = max(self.peak, resident())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.beyond = (self.peak - self.start) / 1e6


with Watch() as of_fit:
    learner = MultiHeadAttentionLearner(3, random_state=0).fit(X, y)
# In the labels' place, which are memory that is there already.
with Watch() as of_predict:
    for at in range(0, n_samples, step):
        y[at : at + step] = learner.predict(X[at : at + step])
print(of_fit.beyond, of_predict.beyond, head_recovery_error(sampler.layer_, learner.layer_))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="counts resident pages as Linux does")
@pytest.mark.parametrize("noise_std", [0.0, 0.1])
def test_a_million_samples(tmp_path, noise_std):
    script = tmp_path / "million.py"
    script.write_text(MILLION)
    done = subprocess.run(
        [sys.executable, str(script), str(noise_std)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    of_fit, of_predict, error = map(float, done.stdout.split())
    assert error < (1e-2 if noise_std else 1e-10)
    print(of_fit, of_predict, error)
    assert of_fit < 300
    assert of_predict < 300
