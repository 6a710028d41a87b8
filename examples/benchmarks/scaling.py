"""Seconds and memory of every stage as samples, heads, features and tokens grow, with fitted exponents.

One quantity grows at a time. Every point is a process of its own, which fits for the time, of several
fits the fastest, and once more for the memory: what Python's allocators hand out during each stage beyond
what there was when the fit began (``tracemalloc``, which slows a fit down), the stages told apart by
scikit-learn's callbacks. The resident memory of the whole fit, inputs left out, is measured too.

    python examples/benchmarks/scaling.py
    python examples/benchmarks/scaling.py --vary n --repeats 1 --fresh
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _records import TABLES, Record, Records, machine, markdown, write

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

STAGES = ("crude_sum", "refine_sum", "sculpt", "span", "heads", "polish", "rest", "whole fit")
BASE = {"n": 4000, "m": 3, "k": 4, "d": 8, "s": 2.0}
# Samples alone: the layer of the claim. The others: with as many samples as keep their multiple of the limit.
SERIES: dict[str, list[dict[str, Any]]] = {
    "n": [BASE | {"n": n} for n in (10_000, 30_000, 100_000, 300_000, 1_000_000)],
    "m": [BASE | {"m": m, "d": 12} for m in (1, 2, 3, 4, 6, 8)],
    "d": [BASE | {"d": d} for d in (4, 8, 16, 32)],
    "k": [BASE | {"k": k} for k in (2, 4, 8, 16)],
}
NAMES = {"n": "samples", "m": "heads", "d": "features", "k": "tokens"}
_MILLION = 1e6
# Seconds, and megabytes beyond the input, that are worth a slope.
_LEAST = 0.02


class StageMemory:
    """A scikit-learn callback that notes the most memory held in each stage beyond the fit's start."""

    def __init__(self) -> None:
        self.start, self.peaks, self.stage = 0, dict.fromkeys(STAGES, 0), "rest"

    def setup(self, estimator: Any, context: Any) -> None:
        """Start anew."""
        tracemalloc.reset_peak()
        self.start = tracemalloc.get_traced_memory()[0]

    def teardown(self, estimator: Any, context: Any) -> None:
        """Note what came last."""
        self._note()

    def _note(self) -> None:
        peak = tracemalloc.get_traced_memory()[1] - self.start
        self.peaks[self.stage] = max(self.peaks[self.stage], peak)
        tracemalloc.reset_peak()

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        """Note what was before this stage."""
        self._note()
        if context.task_name in STAGES:
            self.stage = context.task_name

    def on_fit_task_end(self, estimator: Any, context: Any) -> bool:
        """Note what this stage held."""
        self._note()
        if context.task_name == self.stage:
            self.stage = "rest"
        return False


class ResidentMemory:
    """The most resident memory beyond the start, looked at all the time (Linux; elsewhere nothing)."""

    def __enter__(self) -> ResidentMemory:
        self.start = self.peak = self._resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    @staticmethod
    def _resident() -> int:
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        except OSError:
            return 0

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, self._resident())


def measure(point: dict[str, Any], repeats: int) -> Record:
    """Fit for time, for resident memory and for each stage's memory."""
    warnings.simplefilter("ignore")
    sampler = BooleanAttentionSampler(
        point["m"], point["k"], point["d"], attention_scale=point["s"], random_state=0
    )
    X, y = sampler.sample(500, as_tokens=True)
    MultiHeadAttentionLearner(1, random_state=0).fit(X, y)
    # Chunk by chunk, so that drawing leaves no freed memory behind for the fit to use.
    X, y = (np.empty((point["n"], *array.shape[1:]), dtype=array.dtype) for array in (X, y))
    for at in range(0, point["n"], 10_000):
        part = slice(at, min(at + 10_000, point["n"]))
        X[part], y[part] = sampler.sample(part.stop - at, as_tokens=True)
    learner = MultiHeadAttentionLearner(point["m"], random_state=0)
    best: dict[str, float] = {}
    with ResidentMemory() as resident:
        for _ in range(repeats):
            began = time.perf_counter()
            learner.fit(X, y)
            whole = time.perf_counter() - began
            if not best or whole < best["whole fit"]:
                best = {name: stage.seconds for name, stage in learner.stages_.items()}
                best |= {"rest": whole - sum(best.values()), "whole fit": whole}
    error = head_recovery_error(sampler.layer_, learner.layer_)
    memory = StageMemory()
    tracemalloc.start()
    learner.set_callbacks(memory).fit(X, y)
    tracemalloc.stop()
    memory.peaks["whole fit"] = max(memory.peaks.values())
    return {
        "seconds": best,
        "memory": memory.peaks,
        "resident": resident.peak - resident.start,
        "input": X.nbytes + y.nbytes,
        "error": error,
    }


def run(records: Records, names: Sequence[str], repeats: int, fresh: bool) -> None:
    """Measure what is missing, every point in its own process."""
    for name in names:
        for point in SERIES[name]:
            key = {"vary": name, "point": json.dumps(point)}
            if not fresh and records.find(**key):
                continue
            command = [sys.executable, __file__, "--point", key["point"], "--repeats", str(repeats)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            record = key | json.loads(done.stdout.splitlines()[-1])
            records.add(record)
            seconds, error = record["seconds"]["whole fit"], record["error"]
            print(f"{name} {point}: {seconds:.2f} s, error {error:.0e}", file=sys.stderr, flush=True)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> str:
    """Return the slope of a line through logarithms, nothing where some values are too small to tell."""
    if min(values) < 0.25 * _LEAST or max(values) < _LEAST:
        return ""
    return f"{np.polyfit(np.log(sizes), np.log(values), 1)[0]:.2f}"


def found(records: Records, name: str) -> list[Record]:
    """Return what has been measured of one series, in its order."""
    return [record for point in SERIES[name] if (record := records.find(vary=name, point=json.dumps(point)))]


def sizes_of(series: Sequence[Record], name: str) -> list[int]:
    return [json.loads(record["point"])[name] for record in series]


def section(series: list[Record], name: str) -> str:
    """Return heading and tables of one series."""
    sizes = sizes_of(series, name)
    point = json.loads(series[0]["point"])
    fixed = ", ".join(f"{key} = {value:g}" for key, value in point.items() if key != name)
    head = [NAMES[name], *(f"{size:,}" for size in sizes), "exponent"]
    seconds, memory = [], []
    for stage in STAGES:
        values = [record["seconds"].get(stage, 0.0) for record in series]
        seconds.append([stage, *(f"{value:.3f}" for value in values), exponent(sizes, values)])
        values = [record["memory"].get(stage, 0) / _MILLION for record in series]
        memory.append([stage, *(f"{value:.1f}" for value in values), exponent(sizes, values)])
    values = [record["resident"] / _MILLION for record in series]
    memory.append(["resident, whole fit", *(f"{value:.1f}" for value in values), ""])
    memory.append(["input", *(f"{record['input'] / _MILLION:.1f}" for record in series), ""])
    worst = max(record["error"] for record in series)
    return "\n\n".join(
        [
            f"## {NAMES[name].capitalize()}",
            f"{fixed}; the number of heads given; largest recovery error {worst:.0e}.",
            "Seconds:",
            markdown(head, seconds),
            "Megabytes beyond the input:",
            markdown(head, memory),
        ]
    )


def draw(series: list[Record], name: str, path: Path) -> None:
    """Draw seconds and memory of every stage against what grows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sizes_of(series, name)
    figure, both = plt.subplots(1, 2, figsize=(9.0, 4.4), layout="constrained")
    panels = (("seconds", 1.0, "seconds"), ("memory", _MILLION, "megabytes beyond the input"))
    for axes, (what, unit, label) in zip(both, panels, strict=True):
        for stage in STAGES:
            values = [max(record[what].get(stage, 0) / unit, 1e-4) for record in series]
            style = {"color": "black", "linewidth": 2.0} if stage == "whole fit" else {"linewidth": 1.2}
            slope = exponent(sizes, values)
            text = f"{stage} ({slope})" if slope else stage
            axes.plot(sizes, values, marker="o", markersize=3, label=text, **style)
        axes.set(xscale="log", yscale="log", xlabel=NAMES[name], ylabel=label)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    both[1].plot(sizes, [r["input"] / _MILLION for r in series], color="grey", linestyle="--", label="input")
    for axes in both:
        axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16), title="(exponent)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vary", nargs="+", choices=list(SERIES), default=list(SERIES))
    parser.add_argument("--repeats", type=int, default=3, help="fits for the time (default 3)")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the tables and the results")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, draw, write and print the tables."""
    options = parse(argv)
    if options.point is not None:
        print(json.dumps(measure(options.point, options.repeats)))
        return 0
    records = Records(options.into / "scaling.jsonl", ("vary", "point"))
    run(records, options.vary, options.repeats, options.fresh)
    parts = [
        "Whole fits with default settings and their stages, without noise; exponents are slopes of lines "
        "through the logarithms. " + machine("numpy", "scipy")
    ]
    for name in SERIES:
        series = found(records, name)
        if len(series) > 1:
            parts.append(section(series, name))
            draw(series, name, options.into / f"scaling_{name}.png")
    write("scaling", "\n\n".join(parts), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
