"""How close a fit is to what cannot be undercut: one forward pass, and the information limit.

Three parts, each kept and not measured again unless ``--fresh``:

``passes``
    The time of a fit in units of one ``AttentionLayer.predict`` of the true layer over the training samples,
    a unit that no machine changes. Both are the best of several, the forward pass with one BLAS thread or
    with two, whichever is faster.
``forward``
    The forward pass itself against the same map in torch, in float64 and float32 (extra ``bench``).
``recovery``
    The fraction of seeds recovered from few samples, in multiples of the information limit: the least number
    of samples whose equations outnumber the unknowns, biases not counted, although the default learns them.

    python examples/benchmarks/limits.py
    python examples/benchmarks/limits.py --parts passes --fresh
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_THREADS = 2
for _pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_pool, str(_THREADS))

from _configurations import Array, Configuration, chosen  # noqa: E402
from _records import TABLES, Record, Records, machine, markdown, write  # noqa: E402
from _watch import Watch  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

from sklearn_mhal import (  # noqa: E402
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)

PARTS = ("passes", "forward", "recovery")
MULTIPLES = (1.5, 2, 3, 4, 8)
FEW = (
    Configuration("(4,4,16,2)", 4, 4, 16, 2, 0),
    Configuration("(2,4,10,4)", 2, 4, 10, 4, 0),
)
EXACT = 1e-8
_FITS, _PASSES = 5, 30
# Long fits have had their quiet moments after this many seconds.
_LONG = 10.0


def best_time(function: Callable[[], Any], repeats: int, n_threads: int = _THREADS) -> float:
    """Return the least of several times; what else the machine does only ever adds."""
    times = []
    with threadpool_limits(n_threads, user_api="blas"):
        for _ in range(repeats):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return min(times)


def measure_passes(configuration: Configuration, *, given: bool, seed: int) -> Record:
    """Time fits and forward passes by turns, so that both see the same machine."""
    X, y, truth = configuration.draw(seed)
    forward = fit = until = float("inf")
    error, n_heads = 0.0, 0
    began = time.perf_counter()
    for _ in range(_FITS):
        for n_threads in (1, _THREADS):
            forward = min(forward, best_time(lambda: truth.predict(X), _PASSES, n_threads))
        learner = MultiHeadAttentionLearner(truth.n_heads if given else "auto", random_state=seed)
        fit = min(fit, best_time(lambda learner=learner: learner.fit(X, y), 1))  # type: ignore[misc]
        watch = Watch(truth)
        best_time(lambda watch=watch, learner=learner: learner.set_callbacks(watch).fit(X, y), 1)  # type: ignore[misc]
        until = min(until, watch.seconds.get("1e-08", float("inf")))
        error = max(error, head_recovery_error(truth, learner.layer_))
        n_heads = learner.n_heads_
        if time.perf_counter() - began > _LONG:
            break
    return {"forward": forward, "fit": fit, "until": until, "error": error, "n_heads": n_heads}


def torch_forward(layer: AttentionLayer, X: Array, dtype: Any) -> Callable[[], Any]:
    """Return the same map in torch, all heads in one batched product, ready to be called."""
    import torch

    m, d, n_outputs = layer.projection.shape
    n, k, _ = X.shape
    stacked = torch.tensor(layer.attention.transpose(1, 0, 2).reshape(d, m * d).copy(), dtype=dtype)
    projection = torch.tensor(layer.projection.reshape(m * d, n_outputs).copy(), dtype=dtype)
    bias = torch.tensor(layer.key_bias.reshape(-1).copy(), dtype=dtype)
    intercept = torch.tensor(layer.intercept.copy(), dtype=dtype)
    given = torch.from_numpy(X)

    @torch.inference_mode()
    def forward() -> Any:
        tokens = given.to(dtype)
        queries = torch.addmm(bias, tokens.reshape(n * k, d), stacked)
        scores = torch.bmm(queries.view(n, k * m, d), tokens.transpose(1, 2))
        pooled = torch.bmm(torch.softmax(scores, dim=-1), tokens)
        return torch.addmm(intercept, pooled.view(n * k, m * d), projection)

    return forward


def measure_forward(configuration: Configuration, seed: int) -> Record:
    """Time the forward pass here and in torch by turns."""
    import torch

    X, y, truth = configuration.draw(seed)
    peers = {name: torch_forward(truth, X, getattr(torch, name)) for name in ("float64", "float32")}
    difference = float(abs(peers["float64"]().numpy().reshape(y.shape) - y).max() / abs(y).max())
    record: Record = {"difference": difference}

    for _ in range(4):
        for n_threads in (1, _THREADS):
            torch.set_num_threads(n_threads)
            for name, call in {"ours": lambda: truth.predict(X), **peers}.items():
                seconds = best_time(call, _PASSES // 2, n_threads)
                record[name] = min(record.get(name, float("inf")), seconds)
    return record


def information_limit(layer: AttentionLayer, n_tokens: int) -> int:
    """Return the least number of samples whose equations outnumber the unknowns of heads without biases."""
    m, d, n_outputs = layer.projection.shape
    return -(-m * d * (d + n_outputs) // (n_tokens * n_outputs))


def measure_recovery(configuration: Configuration, multiple: float, seed: int) -> Record:
    """Fit to few samples, the number of heads given."""
    sampler: BooleanAttentionSampler = configuration.sampler(seed)
    limit = information_limit(sampler.layer_, configuration.n_tokens)
    X, y = sampler.sample(round(multiple * limit), as_tokens=True)
    learner = MultiHeadAttentionLearner(configuration.n_heads, random_state=seed)
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A fit that fell short says so; here that is what is counted.
        warnings.simplefilter("ignore")
        learner.fit(X, y)
    seconds = time.perf_counter() - began
    error = head_recovery_error(sampler.layer_, learner.layer_)
    return {"error": error, "seconds": seconds, "n_samples": len(X), "limit": limit}


def run_passes(records: Records, fresh: bool) -> None:
    generic, real = chosen(["(4,4,16,2)", "real heads d'=32"])
    for configuration, given in ((generic, False), (generic, True), (real, True), (real, False)):
        for seed in (0, 1, 2) if configuration is generic else (0,):
            key = {"part": "passes", "name": configuration.name, "setting": given, "seed": seed}
            if fresh or not records.find(**key):
                records.add(key | measure_passes(configuration, given=given, seed=seed))
                print(records.find(**key), file=sys.stderr, flush=True)


def run_forward(records: Records, fresh: bool) -> None:
    for configuration in chosen(["(2,4,10,2)", "(4,4,16,2)", "(8,8,32,4)", "real heads d'=32"]):
        key = {"part": "forward", "name": configuration.name, "setting": "", "seed": 0}
        if fresh or not records.find(**key):
            records.add(key | measure_forward(configuration, 0))
            print(records.find(**key), file=sys.stderr, flush=True)


def run_recovery(records: Records, fresh: bool, n_seeds: int) -> None:
    # Few samples take the longest: many starts are tried.
    for multiple in reversed(MULTIPLES):
        for configuration in FEW:
            for seed in range(n_seeds):
                key = {"part": "recovery", "name": configuration.name, "setting": multiple, "seed": seed}
                if fresh or not records.find(**key):
                    records.add(key | measure_recovery(configuration, multiple, seed))


def passes_table(records: Records) -> str:
    rows = []
    of_part = [record for record in records if record["part"] == "passes"]
    for name, given in dict.fromkeys((record["name"], record["setting"]) for record in of_part):
        found = [record for record in of_part if (record["name"], record["setting"]) == (name, given)]
        ratios = {key: [record[key] / record["forward"] for record in found] for key in ("until", "fit")}
        rows.append(
            [
                name,
                "given" if given else "counted",
                f"{1e3 * min(record['forward'] for record in found):.2f}",
                f"{1e3 * min(record['fit'] for record in found):.0f}",
                *(_span(values) for values in ratios.values()),
                f"{max(record['error'] for record in found):.0e}",
                ", ".join(sorted({str(record["n_heads"]) for record in found})),
            ]
        )
    head = ["(m, k, d, s)", "heads", "forward, ms", "fit, ms", "until 1e-08 / forward", "fit / forward"]
    return markdown([*head, "largest error", "found"], rows)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.0f}" + (f" to {max(values):.0f}" if len(values) > 1 else "")


def forward_table(records: Records) -> str:
    rows = []
    for record in records:
        if record["part"] == "forward":
            ours, peers = record["ours"], [record["float64"], record["float32"]]
            cells = [f"{1e3 * seconds:.2f}" for seconds in (ours, *peers)]
            rows.append([record["name"], *cells, *(f"{ours / seconds:.2f}" for seconds in peers)])
    head = ["(m, k, d, s)", "ours, ms", "torch float64", "torch float32"]
    return markdown([*head, "ours / float64", "ours / float32"], rows)


def recovered(records: Records, name: str, multiple: float) -> tuple[int, int, float]:
    """Return how many seeds were recovered, of how many, and the median seconds."""
    found = [
        record
        for record in records
        if (record["part"], record["name"], record["setting"]) == ("recovery", name, multiple)
    ]
    seconds = sorted(record["seconds"] for record in found)
    return sum(r["error"] <= EXACT for r in found), len(found), seconds[len(found) // 2] if found else 0.0


def recovery_table(records: Records) -> str:
    rows = []
    for configuration in FEW:
        for multiple in MULTIPLES:
            n_found, n_all, seconds = recovered(records, configuration.name, multiple)
            if n_all:
                name = configuration.name
                limit = next(r for r in records if r["part"] == "recovery" and r["name"] == name)["limit"]
                n_samples = round(multiple * limit)
                rows.append(
                    [name, f"{multiple:g}", str(n_samples), f"{n_found} of {n_all}", f"{seconds:.2f}"]
                )
    return markdown(["(m, k, d, s)", "times the limit", "samples", "recovered", "median seconds"], rows)


def draw(records: Records, path: Path) -> None:
    """Draw the fraction of seeds recovered."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    for configuration, marker in zip(FEW, "os", strict=True):
        points = [(multiple, *recovered(records, configuration.name, multiple)) for multiple in MULTIPLES]
        shown = [(multiple, n_found / n_all) for multiple, n_found, n_all, _ in points if n_all]
        axes.plot(*zip(*shown, strict=True), marker=marker, label=f"(m, k, d, s) = {configuration.name}")
    axes.set_xscale("log")
    axes.set_xticks(MULTIPLES, [f"{multiple:g}" for multiple in MULTIPLES])
    axes.minorticks_off()
    axes.set(xlabel="samples / information limit", ylabel="fraction of seeds recovered", ylim=(-0.05, 1.05))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def page(records: Records) -> str:
    """Return the text of the documentation's section."""
    return "\n\n".join(
        [
            machine("numpy", "scipy"),
            "## A fit, in forward passes",
            "The best of several fits with default settings, until the recovery error first falls under 1e-8 "
            "and as a whole, certificate included, over the best of many `AttentionLayer.predict` of the "
            "true layer on the training samples, one BLAS thread or two, whichever is faster.",
            passes_table(records),
            "## The forward pass, against torch",
            "The same int8 tokens to the same outputs, the best of many with one thread or two; ours is "
            "float64.",
            forward_table(records),
            "## Few samples",
            "Seeds whose layer is recovered to 1e-8, the number of heads given, defaults otherwise. The "
            "information limit counts the unknowns of the true layer; the default learns biases besides.",
            recovery_table(records),
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the recovery (default 20)")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print the tables."""
    options = parse(argv)
    records = Records(options.into / "limits.jsonl", ("part", "name", "setting", "seed"))
    X, y, _ = chosen(["(2,4,10,2)"])[0].draw(0)
    MultiHeadAttentionLearner(2, random_state=0).fit(X[:500], y[:500])
    if "passes" in options.parts:
        run_passes(records, options.fresh)
    if "forward" in options.parts:
        run_forward(records, options.fresh)
    if "recovery" in options.parts:
        run_recovery(records, options.fresh, options.seeds)
    if any(record["part"] == "recovery" for record in records):
        options.into.mkdir(parents=True, exist_ok=True)
        draw(records, options.into / "limits.png")
    write("limits", page(records), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
