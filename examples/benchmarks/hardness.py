"""The exponential wall, measured: what parity layers and generic ones cost with every further head.

For every number of heads, two tokens of eight features, the number of heads given and all else default: the
smallest number of samples, doubling from the information limit, at which the fit *recovers* the layer
(recovery error at most 1e-6) and at which it merely *predicts* new samples (relative squared error at most
1e-6), and how many candidates and tuples of net points that fit tried. Where the largest number of samples
did not do, the point is censored: the numbers are lower bounds, marked ">". Growth per head is a
least-squares line through the logarithms of all seeds' points, with the 95 % interval of its slope. Censored
points enter at the largest number of samples, which makes the line no estimate; the page then says how many
there are, fits the points that were reached alone, which leaves out the worst, and gives the first step known
to be steep.

    python examples/benchmarks/hardness.py
    python examples/benchmarks/hardness.py --seeds 5 --most 4096
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _records import TABLES, Record, Records, machine, markdown, write
from scipy import stats

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

# What is drawn and its attention scale: larger is harder, as less of the threshold's shape shows.
CASES = {"generic": ("incoherent", 2.0), "parity, s = 2": ("parity", 2.0), "parity, s = 4": ("parity", 4.0)}
HEADS = (1, 2, 3, 4, 5, 6)
K, D, FOUND = 2, 8, 1e-6
GOALS = {"recovered": "recovery", "predicted": "error"}
COSTS = {"n": "samples", "candidates": "candidates", "tuples": "tuples"}


@dataclass(frozen=True)
class Point:
    """What it took to reach a goal, or what did not do."""

    m: int
    cost: float
    censored: bool


@dataclass(frozen=True)
class Growth:
    """The factor that a further head costs."""

    factor: float
    low: float
    high: float
    n_points: int
    n_censored: int

    def __str__(self) -> str:
        text = f"times {self.factor:.2f} a head ({self.low:.2f} to {self.high:.2f})"
        if self.n_censored:
            text += f", {self.n_censored} of {self.n_points} points censored"
        return text


def attempt(case: str, m: int, n: int, seed: int) -> dict[str, Any]:
    """Fit once to n samples."""
    structure, scale = CASES[case]
    sampler = BooleanAttentionSampler(m, K, D, structure=structure, attention_scale=scale, random_state=seed)
    X, y = sampler.sample(n)
    learner = MultiHeadAttentionLearner(m, n_tokens=K, random_state=seed)
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
        "verdict": learner.certificate_.verdict.split(":")[0],
        "candidates": heads.n_candidates,
        "tuples": heads.n_tuples,
    }


def first_size(m: int) -> int:
    """Return the smallest power of two that is not under the information limit."""
    limit = (m * D * (D + 1 + D) + D) / (K * D)
    return int(2 ** np.ceil(np.log2(limit)))


def point(records: Records, case: str, m: int, seed: int, most: int, goal: str, cost: str) -> Point | None:
    """Return what a goal took: at the first number of samples that reaches it, or at the largest."""
    fits = [r for r in records if (r["case"], r["m"], r["seed"]) == (case, m, seed) and r["n"] <= most]
    fits.sort(key=lambda record: record["n"])
    for fit in fits:
        if fit[GOALS[goal]] <= FOUND:
            return Point(m, fit[cost], False)
    return Point(m, fits[-1][cost], True) if fits else None


def growth(points: Sequence[Point]) -> Growth:
    """Fit a line to the logarithms of the costs over the numbers of heads."""
    costs = np.log([max(item.cost, 1) for item in points])
    line = stats.linregress([item.m for item in points], costs)
    # Equal costs have no spread to tell an interval from.
    half = stats.t.ppf(0.975, len(points) - 2) * line.stderr if np.ptp(costs) > 0 else 0.0
    low, factor, high = np.exp([line.slope - half, line.slope, line.slope + half])
    censored = sum(item.censored for item in points)
    return Growth(float(factor), float(low), float(high), len(points), censored)


def reached_alone(points: Sequence[Point]) -> str:
    """Say what growth the points have that were reached; nothing if all were, or for one number of heads."""
    reached = [item for item in points if not item.censored]
    if len(reached) == len(points) or len({item.m for item in reached}) < 2:
        return ""
    return f"; the {len(reached)} that were reached alone, times {growth(reached).factor:.2f}"


def first_wall(by_heads: dict[int, list[Point]]) -> str:
    """Say what the first further head costs that is not paid for any more; nothing if all are."""

    def missed(m: int) -> bool:
        return 2 * sum(item.censored for item in by_heads[m]) > len(by_heads[m])

    for m in sorted(by_heads)[1:]:
        if missed(m) and not missed(m - 1):
            before = statistics.median_high(item.cost for item in by_heads[m - 1])
            after = statistics.median_high(item.cost for item in by_heads[m])
            # The next number of samples on the grid may do.
            return (
                f"; from {m - 1} to {m} heads at least times {2 * after / before:.0f} on the grid "
                f"({before:.0f} samples, and {after:.0f} do not do)"
            )
    return ""


def points_of(
    records: Records, case: str, seeds: int, most: int, goal: str, cost: str
) -> dict[int, list[Point]]:
    """Return all seeds' points by number of heads."""
    found = {m: [point(records, case, m, seed, most, goal, cost) for seed in range(seeds)] for m in HEADS}
    return {m: known for m, items in found.items() if (known := [item for item in items if item])}


def median(points: Sequence[Point]) -> str:
    """Return the median as text, with ">" if half of the points or more are bounds."""
    value = statistics.median_high(item.cost for item in points)
    return (">" if 2 * sum(item.censored for item in points) >= len(points) else "") + f"{value:.0f}"


def page(records: Records, seeds: int, most: int) -> str:
    """Return the page."""
    rows, lines = [], []
    for case in CASES:
        by_goal = {
            (goal, cost): points_of(records, case, seeds, most, goal, cost)
            for goal in GOALS
            for cost in COSTS
        }
        for m in by_goal["recovered", "n"]:
            row = [case, str(m)]
            for goal in GOALS:
                points = by_goal[goal, "n"][m]
                row += [f"{sum(not item.censored for item in points)} of {len(points)}", median(points)]
            row += [median(by_goal["recovered", cost][m]) for cost in ("candidates", "tuples")]
            rows.append(row)
        for goal in GOALS:
            points = [item for items in by_goal[goal, "n"].values() for item in items]
            wall = first_wall(by_goal[goal, "n"])
            lines.append(f"- {case}, {goal}: samples {growth(points)}{reached_alone(points)}{wall}.")
        for cost in ("candidates", "tuples"):
            points = [item for items in by_goal["recovered", cost].values() for item in items]
            lines.append(f"- {case}, recovered: {cost} {growth(points)}.")
    wrong = sum(record["identified"] and record["recovery"] > FOUND for record in records)
    lost = sum(record["recovery"] > FOUND for record in records)
    head = ["layers", "heads", "recovered", "samples", "predicted", "samples", "candidates", "tuples"]
    return "\n\n".join(
        [
            f"Two tokens of {D} features, {seeds} seeds, at most {most} samples. "
            + machine("numpy", "scipy"),
            markdown(head, rows),
            "Candidates and tuples are those of the fit that recovered the layer, or of the one to the most "
            "samples; 20 random starts and 2500 tuples a span are the most that the default tries. Growth, "
            "with 95 % intervals:",
            "\n".join(lines),
            f"Of {lost} fits that did not recover the layer {wrong} were called identified.",
        ]
    )


def draw(records: Records, seeds: int, most: int, path: Path) -> None:
    """Draw the samples that both goals take against the number of heads."""
    import matplotlib.pyplot as plt

    titles = {"recovered": "to recover the heads", "predicted": "to predict new samples"}
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2), sharey=True, layout="constrained")
    for ax, goal in zip(axes, GOALS, strict=True):
        for place, (case, marker) in enumerate(zip(CASES, "osD", strict=True)):
            points = [
                item for items in points_of(records, case, seeds, most, goal, "n").values() for item in items
            ]
            shift = 0.09 * (place - 1)
            color = f"C{place}"
            for censored in (False, True):
                chosen = [item for item in points if item.censored is censored]
                ax.semilogy(
                    [item.m + shift for item in chosen],
                    [item.cost for item in chosen],
                    "^" if censored else marker,
                    color=color,
                    fillstyle="none" if censored else "full",
                    base=2,
                    alpha=0.7,
                )
            solved = [item for item in points if not item.censored]
            slope = (
                f"times {growth(points).factor:.1f} a head"
                if len(solved) == len(points)
                else (f"{len(points) - len(solved)} of {len(points)} not reached")
            )
            ax.plot([], [], marker, color=color, label=f"{case}: {slope}")
        ax.axhline(most, color="0.6", linestyle=":", linewidth=1)
        ax.set(xlabel="number of heads", title=f"Samples {titles[goal]}", xticks=HEADS)
        ax.set_ylim(top=most * 8)
        ax.legend(frameon=False, loc="upper left", fontsize="small")
    axes[0].set_ylabel("samples (hollow: more than that)")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the table and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="default 2")
    parser.add_argument("--only-seed", type=int, help="measure this seed alone, in a process of its own")
    parser.add_argument("--most", type=int, default=512, help="largest number of samples (default 512)")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    options = parser.parse_args(argv)
    records = Records(options.into / "hardness.jsonl", ("case", "m", "n", "seed"))
    for seed in range(options.seeds) if options.only_seed is None else [options.only_seed]:
        for case in CASES:
            for m in HEADS:
                n = first_size(m)
                while n <= options.most:
                    key: Record = {"case": case, "m": m, "n": n, "seed": seed}
                    if records.find(**key) is None:
                        records.add(key | attempt(case, m, n, seed))
                        print(records.find(**key), file=sys.stderr, flush=True)
                    known = records.find(**key)
                    if known is not None and known["recovery"] <= FOUND:
                        break
                    n *= 2
    write("hardness", page(records, options.seeds, options.most), options.into)
    draw(records, options.seeds, options.most, options.into / "hardness.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
