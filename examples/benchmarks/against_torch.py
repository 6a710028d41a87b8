"""Seconds until the heads are found: this package against Adam in torch and L-BFGS, side by side.

For every configuration and seed, on the same samples:

- this package with its default settings, the number of heads unknown, and once with it given: the time of
  the whole fit, certificate included, so an upper bound on the time until any threshold is passed;
- Adam in torch, float32, cosine schedule, the number of heads given: the best over the learning rates 3e-3,
  1e-2 and 3e-2 and over lengths of the schedule that double up to the cap, only the winner's time counted.
  A run is stopped once it has taken longer than the best one took to 1e-6: it cannot win any more;
- L-BFGS of scipy on the same loss in float64, the number of heads given, from one random start after the
  other: the better of all samples and of ten times as many as the unknowns need.

All may use two threads. Imports and the first use of each library are left out, as is the time that the
peers' recovery error takes to look at. Results are kept, one a line, in ``docs/_tables/against_torch.jsonl``,
and what is there is not measured again, so that this can be run in pieces; the table is made of all of it.

    pip install 'sklearn-mhal[bench]'
    python examples/benchmarks/against_torch.py
    python examples/benchmarks/against_torch.py --configurations 0 3 --seeds 0 --only ours --fresh

The real heads need the weights of ``examples/recover_minilm_heads.py``.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_THREADS = 2
for _pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_pool, str(_THREADS))

from _configurations import CONFIGURATIONS, Array, Configuration, chosen  # noqa: E402
from _records import TABLES, Record, Records, machine, markdown, write  # noqa: E402

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, head_recovery_error  # noqa: E402

THRESHOLDS = (1e-4, 1e-6, 1e-8)
DECISIVE = 1e-6
OURS = ("ours, heads counted", "ours, heads given")
PEERS = ("Adam", "L-BFGS")
_NEVER = math.inf


def measure_ours(X: Array, y: Array, truth: AttentionLayer, *, given: bool, seed: int) -> Record:
    """Fit once; every threshold that the final error is under counts as passed when the fit ends."""
    learner = MultiHeadAttentionLearner(
        n_heads=truth.n_heads if given else "auto", n_tokens=X.shape[1], random_state=seed
    )
    began = time.perf_counter()
    learner.fit(X, y)
    seconds = time.perf_counter() - began
    error = head_recovery_error(truth, learner.layer_)
    stages = {name: stage.seconds for name, stage in learner.stages_.items()}
    return {
        "seconds": {f"{threshold:g}": seconds for threshold in THRESHOLDS if error < threshold},
        "error": error,
        "spent": seconds,
        "setting": f"{learner.n_heads_} heads, {learner.stages_['heads'].message}",
        "stages": stages,
    }


def measure_peer(peer: Callable[..., Any], *data: Any, cap: float, seed: int) -> Record:
    """Run a peer."""
    outcome = peer(*data, cap=cap, seed=seed)
    return {
        "seconds": {f"{threshold:g}": value for threshold, value in outcome.seconds.items()},
        "error": outcome.error,
        "spent": outcome.spent,
        "setting": outcome.setting,
    }


def methods(names: Sequence[str], cap: float) -> dict[str, Callable[..., Record]]:
    """Return how each method is measured, ready to run."""
    found: dict[str, Callable[..., Record]] = {}
    for name in names:
        if name in OURS:
            given = name == OURS[1]

            def ours(*data: Any, seed: int, given: bool = given) -> Record:
                return measure_ours(*data, given=given, seed=seed)

            found[name] = ours
        else:
            import _peers

            peer = {"Adam": _peers.adam, "L-BFGS": _peers.lbfgs}[name]

            def other(*data: Any, seed: int, peer: Callable[..., Any] = peer) -> Record:
                return measure_peer(peer, *data, cap=cap, seed=seed)

            found[name] = other
    return found


def warm_up(names: Sequence[str]) -> None:
    """Let every library load what it loads when first used."""
    from sklearn_mhal import make_boolean_attention

    X, y = make_boolean_attention(300, n_heads=2, n_tokens=3, n_features=4, as_tokens=True, random_state=0)
    MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y)
    if set(names) & set(PEERS):
        import _peers

        _peers.warm_up(_THREADS)


def run(options: argparse.Namespace, records: Records) -> None:
    """Measure what is missing."""
    names = OURS if options.only == "ours" else PEERS if options.only == "peers" else OURS + PEERS
    warm_up(names)
    measures = methods(names, options.cap)
    for configuration in chosen(options.configurations):
        for seed in options.seeds:
            data = None
            for name, measure in measures.items():
                cap = None if name in OURS else options.cap
                key = {"configuration": configuration.name, "seed": seed, "method": name, "cap": cap}
                if not options.fresh and records.find(**key):
                    continue
                data = configuration.draw(seed) if data is None else data
                record = key | measure(*data, seed=seed)
                records.add(record)
                times = ", ".join(f"{at}: {value:.2f} s" for at, value in record["seconds"].items())
                print(
                    f"{configuration.name}, seed {seed}, {name}: {times or 'never'}; "
                    f"error {record['error']:.1e} in {record['spent']:.2f} s; {record['setting']}",
                    file=sys.stderr,
                    flush=True,
                )


def _seconds(record: Record | None, threshold: float) -> float | None:
    """Return the time until a threshold, infinite for never, None where nothing was measured."""
    return None if record is None else record["seconds"].get(f"{threshold:g}", _NEVER)


def _median(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle = statistics.median_high(values)
    return "never" if middle == _NEVER else f"{middle:.2f}"


def _ratio(find: Callable[[str], Record | None], ours: str, cap: float) -> float | None:
    """Return the better peer's time over ours; a peer that never arrives counts as the cap."""
    mine = _seconds(find(ours), DECISIVE)
    theirs = [_seconds(find(name), DECISIVE) for name in PEERS]
    if mine is None or None in theirs:
        return None
    return min(*theirs, cap) / mine  # type: ignore[type-var,operator]


def table(records: Records, cap: float) -> str:
    """Return the page: what was done, the table, the ratios."""
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {name: [] for name in OURS}
    exact: list[bool] = []
    n_unfinished = 0
    for configuration in CONFIGURATIONS:
        seeds = sorted({r["seed"] for r in records if r["configuration"] == configuration.name})
        if not seeds:
            continue

        def find(name: str, seed: int, at: Configuration = configuration) -> Record | None:
            limit = None if name in OURS else cap
            return records.find(configuration=at.name, seed=seed, method=name, cap=limit)

        row = [configuration.name, str(configuration.n_samples)]
        for name in OURS:
            found = [record for seed in seeds if (record := find(name, seed))]
            row.append(_median([record["spent"] for record in found]))
            row.append(f"{max(record['error'] for record in found):.0e}" if found else "")
            exact += [record["error"] <= 1e-10 for record in found]
        for name in PEERS:
            for threshold in THRESHOLDS:
                times = [_seconds(find(name, seed), threshold) for seed in seeds]
                row.append(_median([value for value in times if value is not None]))
        for name in OURS:
            here = [_ratio(lambda method, seed=seed: find(method, seed), name, cap) for seed in seeds]
            known = [value for value in here if value is not None]
            ratios[name] += known
            row.append(f"{min(known):.1f}" if known else "")
            n_unfinished += sum(value is None for value in here)
        rows.append(row)
    heads = ["(m, k, d, s)", "samples"]
    for name in OURS:
        heads += [f"{name}: s", "largest error"]
    heads += [f"{name}: {threshold:g}" for name in PEERS for threshold in THRESHOLDS]
    heads += ["least ratio, counted", "least ratio, given"]
    return "\n\n".join([_preamble(cap), markdown(heads, rows), _summary(ratios, exact, n_unfinished)])


def _preamble(cap: float) -> str:
    return (
        "Seconds, medians over the seeds; the largest error is over all of them. Ours is the time of the "
        "whole fit, from nothing to the certificate; a peer's is the time until its recovery error first "
        f"falls under the threshold, within {cap:g} seconds, the number of heads given, at its best setting. "
        f"The ratio is the better peer's time until {DECISIVE:g} over the time of our whole fit, the least "
        f"over the seeds; a peer that never gets there counts as {cap:g} seconds, which makes the ratio a "
        "lower bound; a fit of ours that does not get there makes it 0. Adam runs in float32, which ends "
        "near 1e-7. " + machine("numpy", "scipy", "torch")
    )


def _summary(ratios: dict[str, list[float]], exact: list[bool], n_unfinished: int) -> str:
    lines = []
    for name, values in ratios.items():
        if values and min(values) > 0.0:
            mean = statistics.geometric_mean(values)
            lines.append(
                f"Ratio, {name}: geometric mean {mean:.1f}, least {min(values):.1f}, over {len(values)} runs."
            )
        elif values:
            failed = sum(value == 0.0 for value in values)
            lines.append(f"Ratio, {name}: none, {failed} of {len(values)} runs did not reach {DECISIVE:g}.")
    lines.append(f"Our fits with an error of at most 1e-10: {sum(exact)} of {len(exact)}.")
    if n_unfinished:
        lines.append(f"Not measured yet: {n_unfinished} ratios.")
    return "\n\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(f"{index} {item.name}" for index, item in enumerate(CONFIGURATIONS))
    parser.add_argument(
        "--configurations", nargs="+", metavar="NAME", help=f"names or numbers; default all: {names}"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--cap", type=float, default=60.0, help="most seconds of a peer's run (default 60)")
    parser.add_argument("--only", choices=["ours", "peers"], help="measure only these")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument(
        "--table-only", action="store_true", help="measure nothing, only write the table of what is there"
    )
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print the table."""
    options = parse(argv)
    keys = ("configuration", "seed", "method", "cap")
    records = Records(options.into / "against_torch.jsonl", keys)
    if not options.table_only:
        run(options, records)
    write("against_torch", table(records, options.cap), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
