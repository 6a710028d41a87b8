"""Seconds until the heads are found: this package against Adam in torch and L-BFGS, side by side.

For every configuration and seed, on the same samples:

- this package with its default settings, the number of heads unknown, and once with it given: the layer as
  scikit-learn's callbacks see it, after every candidate and every step of the polish;
- Adam in torch, float32, the number of heads given, a cosine schedule of 3000 steps, doubled until it gets
  there: the best over the learning rates 3e-3, 1e-2 and 3e-2, only the winner's time counted. A run is
  stopped once it has taken longer than the best one took to 1e-6: it cannot win any more;
- the same Adam with the length of its schedule, too, chosen afterwards, which nobody can: how far it is
  from what could be;
- L-BFGS of scipy on the same loss in float64, the number of heads given, from one random start after the
  other: the better of all samples and of ten times as many as the unknowns need.

All may use two threads. Imports and the first use of each library are left out, as is the time that the
recovery error takes to look at. Results are kept, one a line, in ``docs/_tables/against_torch.jsonl``,
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_THREADS = 2
for _pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_pool, str(_THREADS))

from _configurations import CONFIGURATIONS, Array, Configuration, chosen  # noqa: E402
from _records import TABLES, Record, Records, machine, markdown, write  # noqa: E402
from _watch import THRESHOLDS, Watch  # noqa: E402

from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, head_recovery_error  # noqa: E402

DECISIVE = 1e-6
OURS = ("ours, heads counted", "ours, heads given")
PEERS = ("Adam", "L-BFGS")
FITTED = "Adam, schedule chosen afterwards"
_NEVER = math.inf


def measure_ours(X: Array, y: Array, truth: AttentionLayer, *, given: bool, seed: int) -> Record:
    """Fit once, watched."""
    learner = MultiHeadAttentionLearner(
        n_heads=truth.n_heads if given else "auto", n_tokens=X.shape[1], random_state=seed
    )
    watch = Watch(truth)
    learner.set_callbacks(watch).fit(X, y)
    seconds = watch.elapsed()
    return {
        "seconds": watch.seconds,
        "error": head_recovery_error(truth, learner.layer_),
        "spent": seconds,
        "setting": f"{learner.n_heads_} heads, {learner.stages_['heads'].message}",
        "stages": {name: stage.seconds for name, stage in learner.stages_.items()},
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

            peer = {"Adam": _peers.adam, FITTED: _peers.adam_fitted, "L-BFGS": _peers.lbfgs}[name]

            def other(*data: Any, seed: int, peer: Callable[..., Any] = peer) -> Record:
                return measure_peer(peer, *data, cap=cap, seed=seed)

            found[name] = other
    return found


def warm_up(names: Sequence[str]) -> None:
    """Let every library load what it loads when first used."""
    from sklearn_mhal import make_boolean_attention

    X, y = make_boolean_attention(300, n_heads=2, n_tokens=3, n_features=4, as_tokens=True, random_state=0)
    MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y)
    if set(names) - set(OURS):
        import _peers

        _peers.warm_up(_THREADS)


def run(options: argparse.Namespace, records: Records) -> None:
    """Measure what is missing."""
    names = {"ours": OURS, "peers": PEERS}.get(options.only, (*OURS, *PEERS))
    if options.afterwards:
        names = (*names, FITTED)
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


def _ratio(find: Callable[[str], Record | None], ours: str, peers: Sequence[str], cap: float) -> float | None:
    """Return the better peer's time over ours; a peer that never arrives counts as the cap."""
    mine = _seconds(find(ours), DECISIVE)
    theirs = [_seconds(find(name), DECISIVE) for name in peers]
    if mine is None or None in theirs:
        return None
    return min(*theirs, cap) / mine  # type: ignore[type-var,operator]


def table(records: Records, cap: float) -> str:
    """Return the page: what was done, the tables, the ratios."""
    everything, against = (*OURS, *PEERS), {"Adam and L-BFGS": PEERS}
    if any(record["method"] == FITTED for record in records):
        everything, against = (*everything, FITTED), against | {FITTED: (FITTED,)}
    ratios: dict[tuple[str, str], list[float]] = {(ours, peer): [] for peer in against for ours in OURS}
    times: dict[float, list[list[str]]] = {threshold: [] for threshold in THRESHOLDS}
    whole: list[list[str]] = []
    exact: list[bool] = []
    for configuration in CONFIGURATIONS:
        seeds = sorted({r["seed"] for r in records if r["configuration"] == configuration.name})
        if not seeds:
            continue

        def find(name: str, seed: int, at: Configuration = configuration) -> Record | None:
            limit = None if name in OURS else cap
            return records.find(configuration=at.name, seed=seed, method=name, cap=limit)

        title = [configuration.name, str(configuration.n_samples)]
        for threshold, rows in times.items():
            known = [[_seconds(find(name, seed), threshold) for seed in seeds] for name in everything]
            row = title + [_median([value for value in values if value is not None]) for values in known]
            if threshold == DECISIVE:
                for (ours, peer), so_far in ratios.items():
                    here = [
                        _ratio(lambda name, seed=seed: find(name, seed), ours, against[peer], cap)
                        for seed in seeds
                    ]
                    measured = [value for value in here if value is not None]
                    so_far += measured
                    row.append(f"{min(measured):.1f}" if measured else "")
            rows.append(row)
        row = list(title)
        for name in OURS:
            found = [record for seed in seeds if (record := find(name, seed))]
            row.append(_median([record["spent"] for record in found]))
            row.append(f"{max(record['error'] for record in found):.0e}" if found else "")
            exact += [record["error"] <= 1e-10 for record in found]
        whole.append(row)
    heads = ["(m, k, d, s)", "samples", *everything]
    least = [
        f"least ratio, {ours.removeprefix('ours, heads ')}" + ("" if peer != FITTED else f", {FITTED}")
        for ours, peer in ratios
    ]
    parts = [_preamble(cap), "## Seconds until 1e-06", markdown(heads + least, times[DECISIVE])]
    parts.append(_summary(ratios, exact))
    for threshold in THRESHOLDS:
        if threshold != DECISIVE:
            parts += [f"## Seconds until {threshold:g}", markdown(heads, times[threshold])]
    ends = [head for name in OURS for head in (f"{name}: s", "largest error")]
    parts += ["## The whole fit, certificate included", markdown([*heads[:2], *ends], whole)]
    return "\n\n".join(parts)


def _preamble(cap: float) -> str:
    return (
        "Seconds until the recovery error first falls under a threshold, medians over the seeds; the "
        f"largest error is over all of them. Peers have {cap:g} seconds and are told the number of heads; "
        f"each is shown at its best setting. A ratio is the time of the better peer until {DECISIVE:g} "
        f"over ours, the least over the seeds; a peer that never gets there counts as {cap:g} seconds, which "
        "makes the ratio a lower bound. Adam runs in float32, which ends near 1e-7. "
        + machine("numpy", "scipy", "torch")
    )


def _summary(ratios: dict[tuple[str, str], list[float]], exact: list[bool]) -> str:
    lines = []
    for (ours, peer), values in ratios.items():
        if values and min(values) > 0.0:
            mean = statistics.geometric_mean(values)
            lines.append(
                f"Ratio, {ours} against {peer}: geometric mean {mean:.1f}, least {min(values):.1f}, over "
                f"{len(values)} runs."
            )
        elif values:
            failed = sum(value == 0.0 for value in values)
            lines.append(f"Ratio, {ours}: none, {failed} of {len(values)} runs did not reach {DECISIVE:g}.")
    lines.append(f"Our fits with an error of at most 1e-10: {sum(exact)} of {len(exact)}.")
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
    parser.add_argument(
        "--afterwards", action="store_true", help="also try schedules of Adam to choose from afterwards"
    )
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
