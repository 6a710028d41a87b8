"""
Data that no process loads whole, on a Dask cluster
===================================================

Write the examples of a layer to two files, chunk by chunk, start a cluster of worker processes that
speak TCP, and learn the layer: ``joblib.parallel_config("dask")`` is all that a fit needs to be told.
Passes over the samples are cut into blocks; the workers are sent where in the files a block is, map that
part themselves and return sums. The parameters are the same, to the last bit, whatever the number of
workers.

The labels are noisy, so that the fit has to pass over all samples many times. At the end each worker says
how much memory it ever held beyond what it held at the start of the fit, pages of the files included::

    pip install 'sklearn-mhal[dask]'
    python examples/learn_on_dask_cluster.py

Workers on other machines must see the files under the same path; to those that do not, rows are sent
instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from joblib import parallel_config

from sklearn_mhal import (
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)

Array = np.ndarray[Any, np.dtype[Any]]
_MIB = 2**20
_CHUNK = 10_000


def write_chunks(sampler: BooleanAttentionSampler, n_samples: int, folder: Path) -> tuple[Path, Path]:
    """Draw samples and write them, a chunk at a time."""
    X, y = sampler.sample(1, as_tokens=True)
    paths = folder / "tokens.npy", folder / "labels.npy"
    tokens, labels = (
        np.lib.format.open_memmap(path, mode="w+", dtype=array.dtype, shape=(n_samples, *array.shape[1:]))
        for path, array in zip(paths, (X, y), strict=True)
    )
    for start in range(0, n_samples, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, n_samples))
        tokens[chunk], labels[chunk] = sampler.sample(chunk.stop - start, as_tokens=True)
    tokens.flush()
    labels.flush()
    return paths


def resident_memory() -> int:
    """Return the bytes of this process in memory, pages of mapped files included (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Notes the most memory this process ever has, looking a hundred times a second."""

    def __init__(self) -> None:
        self.start = self.peak = resident_memory()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, resident_memory())

    def stop(self) -> int:
        """Return the peak beyond the start."""
        self.done.set()
        self.thread.join()
        return self.peak - self.start


def start_watch(dask_worker: Any) -> None:
    """Start watching a worker."""
    # What a worker imports for its first task is not data.
    import sklearn_mhal  # noqa: F401

    dask_worker.memory_watch = MemoryWatch()


def stop_watch(dask_worker: Any) -> int:
    """Return a worker's peak beyond its start."""
    peak: int = dask_worker.memory_watch.stop()
    return peak


def learn(paths: tuple[Path, Path], n_heads: int, n_workers: int) -> tuple[AttentionLayer, list[int], float]:
    """Learn from files on a local cluster; return the layer, the workers' peaks and the seconds."""
    from distributed import Client, LocalCluster

    X, y = (np.load(path, mmap_mode="r") for path in paths)
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=True,
            protocol="tcp://",
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(start_watch)
        learner = MultiHeadAttentionLearner(n_heads, random_state=0)
        began = time.perf_counter()
        with parallel_config("dask"):
            learner.fit(X, y)
        seconds = time.perf_counter() - began
        peaks = list(client.run(stop_watch).values())
    return learner.layer_, peaks, seconds


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn a layer on a local Dask cluster from data that no process loads whole.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=300_000, help="samples to write and learn from")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation of the label noise")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Learn on the cluster and alone; return 0 if the parameters agree and no worker held half the data."""
    options = parse(argv)
    sampler = BooleanAttentionSampler(
        options.heads,
        options.tokens,
        options.features,
        noise_std=options.noise,
        random_state=options.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = write_chunks(sampler, options.samples, Path(folder))
        whole = sum(path.stat().st_size for path in paths)
        print(f"{options.samples} samples in two files of together {whole / _MIB:.0f} MiB")
        layer, peaks, seconds = learn(paths, options.heads, options.workers)
        print(f"Learned on {len(peaks)} workers in {seconds:.1f} s")
        for number, peak in enumerate(peaks):
            print(f"worker {number}: {peak / _MIB:.0f} MiB at most, {peak / whole:.0%} of the data")
        X, y = (np.load(path, mmap_mode="r") for path in paths)
        alone = MultiHeadAttentionLearner(options.heads, random_state=0).fit(X, y).layer_
    difference = max(
        float(np.abs(layer.attention - alone.attention).max()),
        float(np.abs(layer.projection - alone.projection).max()),
    )
    print(f"Largest difference to the fit without a cluster: {difference:.1e}")
    print(f"Recovery error, which is the noise's: {head_recovery_error(sampler.layer_, layer):.1e}")
    return 0 if difference <= 1e-10 and max(peaks) < 0.5 * whole else 1


if __name__ == "__main__":
    sys.exit(main())
