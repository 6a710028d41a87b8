"""What the stages achieve, next to what is proved of them: errors against n, m, k, d and s.

The stages alone, without polish, on generic layers, the number of heads given: relative error of the crude
and of the refined sum, sine of the angle between the sculpted directions and the true ones, relative error
of the heads. Medians over the seeds; an exponent is the slope of a least-squares line through the logarithms
of all seeds' errors, with its 95 % interval. For the number of heads, where the paper's bounds are
exponential, the page also has the factor that a further head costs.

    python examples/benchmarks/guarantees.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _records import TABLES, Record, Records, machine, markdown, write
from scipy import stats

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._stage_errors import stage_errors

BASE = {"m": 2, "k": 4, "d": 8, "s": 1.0, "n": 10_000}
GRIDS: dict[str, tuple[float, ...]] = {
    "n": (1000, 3000, 10_000, 30_000),
    "n at m = 3": (1000, 3000, 10_000, 30_000),
    "m": (2, 3, 4),
    "k": (3, 4, 6),
    "d": (6, 8, 12, 16),
    "s": (0.5, 1.0, 2.0, 4.0),
}
STAGES = {
    "crude_sum": "crude sum, relative error",
    "refine_sum": "refined sum, relative error",
    "sculpt": "sculpted directions, sine",
    "heads": "heads before polish, relative error",
}


def size_of(name: str, value: float) -> dict[str, float]:
    """Return the size of a point of a grid."""
    varied, _, fixed = name.partition(" at m = ")
    return BASE | ({"m": int(fixed)} if fixed else {}) | {varied: value}


def measure(size: dict[str, float], seed: int) -> Record:
    """Run the stages once."""
    m, k, d, n = (int(size[name]) for name in "mkdn")
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=size["s"], random_state=seed)
    X, y = sampler.sample(n)
    learner = MultiHeadAttentionLearner(
        m, n_tokens=k, polish=False, fit_intercept=False, stage_samples=n, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner.fit(X, y)
    errors = stage_errors(learner.stages_, sampler.layer_)
    return {name: errors[name].error for name in STAGES if name in errors}


def errors_of(records: Records, name: str, stage: str) -> dict[float, list[float]]:
    """Return every seed's errors of a stage by the value of what varies."""
    found: dict[float, list[float]] = {}
    for value in GRIDS[name]:
        errors = [r[stage] for r in records if (r["name"], r["value"]) == (name, value) and stage in r]
        if errors:
            found[value] = errors
    return found


def slope(errors: dict[float, list[float]], *, per_unit: bool = False) -> str:
    """Return the exponent, or the factor for one more, with its 95 % interval."""
    pairs = [(value, error) for value, seeds in errors.items() for error in seeds]
    values, logs = np.array([value for value, _ in pairs]), np.log([error for _, error in pairs])
    line = stats.linregress(values if per_unit else np.log(values), logs)
    half = stats.t.ppf(0.975, len(pairs) - 2) * line.stderr
    ends = np.array([line.slope, line.slope - half, line.slope + half])
    middle, low, high = np.exp(ends) if per_unit else ends
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def page(records: Records, seeds: int) -> str:
    """Return the tables."""
    base = ", ".join(f"{name} = {value:g}" for name, value in BASE.items())
    parts = [f"{base} but for what varies; {seeds} seeds. " + machine("numpy", "scipy")]
    for name, grid in GRIDS.items():
        rows = []
        for stage, title in STAGES.items():
            errors = errors_of(records, name, stage)
            cells = [f"{statistics.median(errors[value]):.1e}" if value in errors else "-" for value in grid]
            ends = [slope(errors)] + ([slope(errors, per_unit=True)] if name == "m" else [])
            rows.append([title, *cells, *ends])
        head = [name, *(f"{v:g}" for v in grid), "exponent"] + (["factor a head"] if name == "m" else [])
        parts += [f"## Against {name}", markdown(head, rows)]
    return "\n\n".join(parts)


def draw(records: Records, path: Path) -> None:
    """Draw every stage's errors against everything that varies."""
    import matplotlib.pyplot as plt

    names = {"n": "samples, m = 2", "n at m = 3": "samples, m = 3", "m": "heads m", "k": "tokens k"}
    names |= {"d": "features d", "s": "attention scale s"}
    figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharey=True, layout="constrained")
    for ax, (name, label) in zip(axes.flat, names.items(), strict=True):
        for stage, marker in zip(STAGES, "osD^", strict=True):
            errors = errors_of(records, name, stage)
            medians = [statistics.median(seeds) for seeds in errors.values()]
            (line,) = ax.loglog(list(errors), medians, marker=marker, label=STAGES[stage])
            every = [(value, error) for value, seeds in errors.items() for error in seeds]
            ax.loglog(*zip(*every, strict=True), marker, color=line.get_color(), alpha=0.25, markersize=4)
        grid = GRIDS[name]
        ax.set_xticks(grid, [f"{value:,g}" for value in grid])
        ax.set_xticks([], minor=True)
        ax.set(xlabel=label)
        ax.grid(axis="y", color="0.92")
    for ax in axes[:, 0]:
        ax.set_ylabel("error")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing; write the tables and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the tables and the results")
    options = parser.parse_args(argv)
    records = Records(options.into / "guarantees.jsonl", ("name", "value", "seed"))
    for seed in range(options.seeds):
        for name, grid in GRIDS.items():
            for value in grid:
                key = {"name": name, "value": value, "seed": seed}
                if records.find(**key) is None:
                    records.add(key | measure(size_of(name, value), seed))
                    print(records.find(**key), file=sys.stderr, flush=True)
    write("guarantees", page(records, options.seeds), options.into)
    draw(records, options.into / "guarantees.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
