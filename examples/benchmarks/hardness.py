"""The exponential wall, measured: what parity layers and generic ones cost with every further head.

For every number of heads and both structures, two tokens of eight features, the number of heads given: the
smallest number of samples, on a grid of powers of two, at which the fit predicts new samples to a relative
squared error of 1e-6; and how many candidates and tuples of net points the search had tried by then. A fit
that gets nowhere on the largest grid point makes the numbers lower bounds, marked ">", and growth is fitted
through them all the same: it is then a lower bound itself. Seeds are independent; the table shows medians.

    python examples/benchmarks/hardness.py
    python examples/benchmarks/hardness.py --seeds 5 --most 16384
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _records import TABLES, Record, Records, machine, markdown, write

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

STRUCTURES = ("incoherent", "parity")
HEADS = (1, 2, 3, 4, 5, 6)
K, D, FOUND = 2, 8, 1e-6
_FEWEST, _STARTS, _STEPS = 32, 20, 60


def attempt(structure: str, m: int, n: int, seed: int) -> dict[str, Any]:
    """Fit once to n samples."""
    sampler = BooleanAttentionSampler(m, K, D, structure=structure, random_state=seed)
    X, y = sampler.sample(n)
    learner = MultiHeadAttentionLearner(
        m, n_tokens=K, heads_starts=_STARTS, max_iter=_STEPS, random_state=seed
    )
    with warnings.catch_warnings():
        # A fit that fell short says so; here that is what is measured.
        warnings.simplefilter("ignore")
        learner.fit(X, y)
    X_new, y_new = sampler.sample(1000)
    heads = learner.stages_["heads"]
    return {
        "error": float(np.mean((learner.predict(X_new) - y_new) ** 2) / np.mean(y_new**2)),
        "recovery": head_recovery_error(sampler.layer_, learner.layer_),
        "identified": learner.certificate_.identified,
        "candidates": heads.n_candidates,
        "tuples": heads.n_tuples,
    }


def measure(structure: str, m: int, seed: int, most: int) -> Record:
    """Double the samples until the layer is found; add up what the search has tried."""
    n, candidates, tuples = _FEWEST, 0, 0
    while True:
        tried = attempt(structure, m, n, seed)
        candidates, tuples = candidates + tried["candidates"], tuples + tried["tuples"]
        found = tried["error"] < FOUND
        if found or 2 * n > most:
            break
        n *= 2
    return tried | {"n": n, "found": found, "candidates": candidates, "tuples": tuples}


def growth(counts: Sequence[float]) -> float:
    """Return the factor a further head costs: the slope of the logarithm over the numbers of heads."""
    return float(np.exp(np.polyfit(HEADS[: len(counts)], np.log(np.maximum(counts, 1)), 1)[0]))


def summary(records: Records, most: int) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """Return the page, and the medians by structure."""
    rows: list[list[str]] = []
    medians: dict[str, dict[str, list[float]]] = {
        s: {"n": [], "candidates": [], "tuples": []} for s in STRUCTURES
    }
    false_certainty = 0
    for structure in STRUCTURES:
        for m in HEADS:
            found = [r for r in records if (r["structure"], r["m"], r["most"]) == (structure, m, most)]
            if not found:
                continue
            n_found = sum(record["found"] for record in found)
            bound = ">" if 2 * n_found <= len(found) else ""
            row = [structure, str(m), f"{n_found} of {len(found)}"]
            for key, values in medians[structure].items():
                values.append(statistics.median_high([record[key] for record in found]))
                row.append(f"{bound}{values[-1]:.0f}")
            row.append(f"{statistics.median_high([record['error'] for record in found]):.0e}")
            row.append(f"{statistics.median_high([record['recovery'] for record in found]):.0e}")
            rows.append(row)
            false_certainty += sum(r["identified"] and r["recovery"] > FOUND for r in found)
    head = ["structure", "heads", "found", "samples", "candidates", "tuples", "error", "recovery error"]
    text = [
        f"Two tokens of {D} features, at most {most} samples, {_STARTS} starts of at most {_STEPS} steps. "
        + machine("numpy", "scipy"),
        markdown(head, rows),
    ]
    for structure in STRUCTURES:
        factors = {key: growth(values) for key, values in medians[structure].items() if values}
        text.append(
            f"Growth with every further head, {structure} layers: "
            + ", ".join(f"{key} times {factor:.2f}" for key, factor in factors.items())
            + "."
        )
    text.append(f"Fits called identified that were not the layer: {false_certainty}.")
    return "\n\n".join(text), medians


def draw(medians: dict[str, dict[str, list[float]]], records: Records, most: int, path: Path) -> None:
    """Draw samples and candidates against the number of heads."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for ax, key in zip(axes, ("n", "candidates"), strict=True):
        for structure, marker in zip(STRUCTURES, "os", strict=True):
            values = medians[structure][key]
            heads = HEADS[: len(values)]
            factor = growth(values)
            label = f"{structure}, times {factor:.1f} a head"
            (line,) = ax.semilogy(heads, values, marker, label=label)
            fit = np.polyfit(heads, np.log(values), 1)
            ax.semilogy(heads, np.exp(np.polyval(fit, heads)), "-", color=line.get_color(), alpha=0.5)
            for m, value in zip(heads, values, strict=True):
                found = [
                    r["found"] for r in records if (r["structure"], r["m"], r["most"]) == (structure, m, most)
                ]
                if 2 * sum(found) <= len(found):
                    ax.annotate(
                        "",
                        (m, 1.6 * value),
                        (m, value),
                        arrowprops={"arrowstyle": "->", "color": line.get_color()},
                    )
        ax.set(xlabel="number of heads", ylabel={"n": "samples", "candidates": "candidates tried"}[key])
        ax.legend(frameon=False)
    figure.suptitle("Until the layer is found; arrows: not found, a lower bound")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the table and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--most", type=int, default=2048, help="largest number of samples (default 2048)")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    options = parser.parse_args(argv)
    records = Records(options.into / "hardness.jsonl", ("structure", "m", "seed", "most"))
    for seed in range(options.seeds):
        for m in HEADS:
            for structure in STRUCTURES:
                key = {"structure": structure, "m": m, "seed": seed, "most": options.most}
                if records.find(**key) is None:
                    records.add(key | measure(structure, m, seed, options.most))
                    print(records.find(**key), file=sys.stderr, flush=True)
    text, medians = summary(records, options.most)
    write("hardness", text, options.into)
    draw(medians, records, options.most, options.into / "hardness.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
