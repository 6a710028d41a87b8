"""Sums over all samples: what is summed, and that nobody can tell by whom."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from joblib import parallel_config
from sklearn import config_context

from sklearn_mhal import MultiHeadAttentionLearner, make_boolean_attention
from sklearn_mhal._blocks import Block, blocks_of, rows_in_file
from sklearn_mhal._examples import make_examples
from sklearn_mhal._sums import gradient_all, regress_all, residual_power, sum_over_samples

M, K, D, N = 2, 3, 4, 4000


@pytest.fixture(scope="module")
def data():
    return make_boolean_attention(
        N, n_heads=M, n_tokens=K, n_features=D, noise_std=0.1, as_tokens=True, random_state=0
    )


@pytest.fixture
def attention():
    return np.random.default_rng(0).standard_normal((D + 1, M * D))


def make(data, **kwargs):
    return make_examples(*data, fit_intercept=True, random_state=0, **kwargs)


def all_sums(examples, attention, n_jobs=None):
    projection, intercept = regress_all(examples, attention, ridge=0.0, n_jobs=n_jobs)
    gradient, squares = gradient_all(examples, attention, projection, intercept, n_jobs=n_jobs)
    power = residual_power(examples, attention, projection, intercept, n_jobs=n_jobs)
    return projection, intercept, gradient, squares, power


def in_blocks(examples):
    """Many blocks of many chunks: 0.02 MiB at a time."""
    assert len(blocks_of(examples)) > 4
    assert examples.chunk_size(M) < blocks_of(examples)[0].examples.n_samples
    return examples


def weights_with_gaps():
    return np.arange(N) % 3.0


@pytest.mark.parametrize("weights", [None, weights_with_gaps()], ids=["all", "weighted"])
class TestSums:
    def test_blocks_sum_to_what_all_rows_do(self, data, attention, weights):
        expected = all_sums(make(data, sample_weight=weights), attention)
        with config_context(working_memory=0.02):
            summed = all_sums(in_blocks(make(data, sample_weight=weights)), attention)
        for mine, theirs in zip(summed, expected, strict=True):
            # Rounding of sums over 12,000 rows, in another order.
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("backend", ["threading", "loky"])
    def test_the_bits_are_those_of_one_worker(self, data, attention, weights, backend):
        with config_context(working_memory=0.02):
            expected = all_sums(in_blocks(make(data, sample_weight=weights)), attention)
            with parallel_config(backend, n_jobs=2):
                summed = all_sums(make(data, sample_weight=weights), attention)
        for mine, theirs in zip(summed, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_threads_give_the_same_fit(data):
    fits = []
    with config_context(working_memory=0.05):
        for n_jobs in (None, 1, 2, 3):
            learner = MultiHeadAttentionLearner(M, n_jobs=n_jobs, random_state=0).fit(*data)
            fits.append(np.concatenate([learner.attention_matrices_, learner.projection_matrices_]))
    for other in fits[1:]:
        np.testing.assert_array_equal(other, fits[0])


def test_working_memory_reaches_the_threads(data):
    # scikit-learn's settings are a thread's own; the size of a chunk is settled before.
    sizes = set()

    def part(chunk):
        sizes.add(chunk.n_samples)
        return (float(chunk.n_samples),)

    with config_context(working_memory=0.02):
        examples = make(data)
        assert sum_over_samples(part, examples, n_heads=M, n_jobs=2) == (N,)
        assert max(sizes) == examples.chunk_size(M)


def test_a_part_that_fails_says_so(data):
    def part(chunk):
        raise FileNotFoundError("no such file")

    with config_context(working_memory=0.02), pytest.raises(FileNotFoundError, match="no such file"):
        sum_over_samples(part, make(data), n_heads=M, n_jobs=2)


class TestBlocks:
    def mapped(self, data, folder):
        arrays = []
        for name, array in zip(("tokens", "labels"), data, strict=True):
            np.save(folder / f"{name}.npy", array)
            arrays.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
        return arrays

    @pytest.mark.parametrize("weights", [None, weights_with_gaps()], ids=["all", "weighted"])
    @pytest.mark.parametrize("form", ["memory", "files", "tokens in a file"])
    def test_pickled_and_back(self, data, tmp_path, form, weights):
        mapped = self.mapped(data, tmp_path)
        given = {"memory": data, "files": mapped, "tokens in a file": (mapped[0], data[1])}[form]
        with config_context(working_memory=0.02):
            blocks = blocks_of(make(given, sample_weight=weights))
        assert sum(block.examples.n_samples for block in blocks) == np.sum(
            np.ones(N) if weights is None else weights > 0
        )
        for block in blocks[:3]:
            text = pickle.dumps(block)
            # Twice: a cluster hands blocks on from worker to worker.
            there = pickle.loads(pickle.dumps(pickle.loads(text)))
            for mine, theirs in zip(there.chunks(7), block.chunks(7), strict=True):
                np.testing.assert_array_equal(mine.white_tokens(), theirs.white_tokens())
                np.testing.assert_array_equal(mine.white_labels(), theirs.white_labels())
                np.testing.assert_array_equal(mine.weights, theirs.weights)
            rows = block.examples.n_samples * (data[0][:1].nbytes + data[1][:1].nbytes)
            if form == "files" and weights is None:
                assert len(text) < 4000 < rows
            if form == "memory":
                assert rows < len(text) < 1.2 * rows + 6000

    def test_rows_in_file(self, data, tmp_path):
        tokens, _ = self.mapped(data, tmp_path)
        # As validation returns it: a view of a view, of another shape, no memmap any more.
        view = np.asarray(tokens).reshape(N, -1)[100:].reshape(N - 100, K, D)
        located = rows_in_file(view, 5, 9)
        np.testing.assert_array_equal(located.open(), data[0][105:109])
        with pytest.raises(ValueError, match="read-only"):
            located.open()[:] = 0
        assert rows_in_file(data[0], 5, 9) is None
        assert rows_in_file(np.asarray(tokens)[:, ::-1], 5, 9) is None
        assert rows_in_file(tokens.astype(float), 5, 9) is None

    def test_size_counts_what_would_be_sent(self, data, tmp_path):
        sent, left = Block(make(data)).__sizeof__(), Block(make(self.mapped(data, tmp_path))).__sizeof__()
        assert sent - left == data[0].nbytes + data[1].nbytes
