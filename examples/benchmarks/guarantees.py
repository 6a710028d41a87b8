"""What the stages achieve, next to what is proved of them: errors against n, m, k, d and s.

The stages alone, without polish, on generic layers, the number of heads given: relative error of the crude
and of the refined sum, sine of the angle between the sculpted directions and the true ones, relative error of
the heads. Medians over the seeds; an exponent is the slope of a line through the logarithms.

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

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._stage_errors import stage_errors

BASE = {"m": 2, "k": 4, "d": 8, "s": 1.0, "n": 10_000}
GRIDS = {
    "n": (1000, 3000, 10_000, 30_000),
    "m": (2, 3, 4),
    "k": (3, 4, 6),
    "d": (6, 8, 12, 16),
    "s": (0.5, 1.0, 2.0, 4.0),
}
STAGES = ("crude_sum", "refine_sum", "sculpt", "heads")


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


def page(records: Records) -> str:
    """Return the tables."""
    base = ", ".join(f"{name} = {value:g}" for name, value in BASE.items())
    parts = [f"{base} but for what varies. " + machine("numpy", "scipy")]
    for name, grid in GRIDS.items():
        rows = []
        for stage in STAGES:
            values = []
            for value in grid:
                found = [r[stage] for r in records if (r["name"], r["value"]) == (name, value) and stage in r]
                values.append(statistics.median(found) if found else float("nan"))
            known = np.isfinite(values)
            slope = (
                np.polyfit(np.log(np.array(grid)[known]), np.log(np.array(values)[known]), 1)[0]
                if known.sum() > 1
                else np.nan
            )
            cells = ["-" if np.isnan(value) else f"{value:.1e}" for value in values]
            rows.append([stage.replace("_", " "), *cells, f"{slope:.1f}"])
        parts += [f"## Against {name}", markdown([name, *(f"{v:g}" for v in grid), "exponent"], rows)]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the tables."""
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
                    records.add(key | measure(BASE | {name: value}, seed))
                    print(records.find(**key), file=sys.stderr, flush=True)
    write("guarantees", page(records), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
