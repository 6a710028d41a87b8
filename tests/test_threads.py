"""Parts of a computation among threads: order, failures, limits, and bits that do not depend on them."""

from __future__ import annotations

import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from sklearn_mhal import MultiHeadAttentionLearner, _forward, _threads, make_boolean_attention
from sklearn_mhal._forward import TokenRows
from sklearn_mhal._threads import in_parts, sum_in_parts, team_of, threads_of_blas


def blas_threads():
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_results_are_in_order(n_threads):
    with team_of(n_threads):
        assert in_parts(lambda part: part**2, range(40)) == [part**2 for part in range(40)]
        assert sum_in_parts(lambda part: [part], range(40)) == list(range(40))
        assert in_parts(lambda part: part, []) == []


def test_parts_run_at_the_same_time():
    # A barrier that one thread alone would wait at for ever.
    barrier = threading.Barrier(2, timeout=60.0)
    with team_of(2):
        assert sorted(in_parts(lambda _: barrier.wait(), range(2))) == [0, 1]


@pytest.mark.parametrize("failing", [0, 1, 7])
def test_a_failure_arrives_after_all_threads_have_ended(failing):
    running = 0
    lock = threading.Lock()

    def work(part):
        nonlocal running
        with lock:
            running += 1
        try:
            if part == failing:
                raise ZeroDivisionError(str(part))
        finally:
            with lock:
                running -= 1

    with team_of(3):
        with pytest.raises(ZeroDivisionError, match=str(failing)):
            in_parts(work, range(8))
        assert running == 0
        # The team works on.
        assert in_parts(lambda part: part, range(3)) == [0, 1, 2]


def test_parts_within_parts_do_not_wait_for_themselves():
    with team_of(2):
        found = in_parts(lambda part: in_parts(lambda inner: part * inner, range(3)), range(4))
    assert found == [[part * inner for inner in range(3)] for part in range(4)]


def test_flags_of_numpy_hold_in_every_thread():
    barrier = threading.Barrier(2, timeout=60.0)

    def divide(part):
        barrier.wait()
        return np.float64(part) / np.float64(0.0)

    with warnings.catch_warnings(), team_of(2):
        warnings.simplefilter("error")
        with np.errstate(all="ignore"):
            assert np.isinf(in_parts(divide, [1, 2])).all()


def test_blas_gets_one_thread_and_ours_are_no_more_than_it_had(monkeypatch):
    before = blas_threads()
    with threads_of_blas():
        assert blas_threads() == {1}
    assert blas_threads() == before
    with threadpool_limits(1, user_api="blas"), threads_of_blas():
        assert _threads._TEAM.get() is None
    monkeypatch.setattr(_threads, "cpu_count", lambda: 1)
    with threads_of_blas():
        assert _threads._TEAM.get() is None


def test_shares_cover_the_samples_once_and_grow_with_them():
    rng, sizes = np.random.default_rng(0), []
    for n in (1, 7, 2000):
        rows = TokenRows(rng.standard_normal((n, 8, 16)))
        shares = rows.shares(128)
        assert [shares[0].start, shares[-1].stop] == [0, n]
        assert all(one.stop == other.start for one, other in pairwise(shares))
        assert all(share.stop > share.start for share in shares)
        sizes.append(len(shares))
    assert sizes[0] == sizes[1] == 1 < sizes[2]


def test_some_rows_are_views_of_all():
    rng = np.random.default_rng(0)
    rows = TokenRows(
        rng.standard_normal((9, 3, 4)), affine=True, readout="first", root_weights=rng.uniform(1, 2, 9)
    )
    some = rows.between(slice(2, 6))
    alone = TokenRows(rows.tokens[2:6], affine=True, readout="first", root_weights=rows.root_weights[2:6])
    attention = rng.standard_normal((5, 8))
    assert np.shares_memory(some.tokens, rows.tokens)
    np.testing.assert_array_equal(some.patterns(attention), alone.patterns(attention))
    patterns = some.patterns(attention)
    np.testing.assert_array_equal(some.pooled(patterns), alone.pooled(patterns))
    np.testing.assert_array_equal(rows.pooled(rows.patterns(attention))[2:6], some.pooled(patterns))


@pytest.mark.parametrize("readout", ["tokens", "mean"])
def test_a_fit_has_the_same_bits_on_any_number_of_threads(monkeypatch, readout):
    # So small a share that this small problem has several.
    monkeypatch.setattr(_forward, "_NUMBERS_PER_SHARE", 200)
    X, y, layer = make_boolean_attention(
        400, n_heads=2, n_tokens=3, n_features=6, random_state=0, return_layer=True
    )
    if readout == "mean":
        y = layer.predict(X.reshape(400, 3, 6)).mean(axis=1)
    rng = np.random.default_rng(0)
    weights, y = rng.uniform(0.5, 2.0, 400), y + 0.01 * rng.standard_normal(y.shape)

    def fit(n_threads):
        used = set()
        original = _forward.TokenRows.backward_product
        # Whoever comes first waits for the others, which there have to be.
        barrier = threading.Barrier(n_threads, timeout=60.0)

        def watched(self, *arguments, **keywords):
            if not used:
                barrier.wait()
            used.add(threading.get_ident())
            return original(self, *arguments, **keywords)

        with monkeypatch.context() as patch, team_of(n_threads):
            patch.setattr(_forward.TokenRows, "backward_product", watched)
            patch.setattr(_threads, "cpu_count", lambda: 1)
            learner = MultiHeadAttentionLearner(2, n_tokens=3, readout=readout, random_state=0)
            learner.fit(X, y, weights)
        return learner, len(used)

    (alone, one), (shared, several) = fit(1), fit(2)
    assert (one, several) == (1, 2)
    for name in ("attention_matrices_", "projection_matrices_", "attention_std_errors_", "noise_std_"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(shared, name))
    assert alone.certificate_.smallest_eigenvalue == shared.certificate_.smallest_eigenvalue
