"""Seconds of every stage, now and in the first version that learned a layer end to end.

The earlier version is checked out beside this one, in a folder that is removed again, and is run on the same
samples, by turns with this one; of several fits the fastest counts. Needs the repository's history.

    python examples/benchmarks/stages.py
    python examples/benchmarks/stages.py --before 23f5183 --configurations 1 3 --repeats 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _configurations import Configuration, chosen
from _records import TABLES, Record, Records, machine, markdown, write

ROOT = Path(__file__).resolve().parents[2]
FIRST = "23f5183"
STAGES = ("crude_sum", "refine_sum", "sculpt", "span", "heads", "polish")
_DEFAULT = ["(1,4,16,2)", "(2,4,10,2)", "(3,6,12,4)", "(4,4,16,2)", "(8,4,8,8)", "multiscale (4,4,12,4)"]
# Run by either version, so it uses nothing that the first one lacks.
FIT = """
import json, sys, time, warnings
import numpy as np
from sklearn_mhal import AttentionLayer, MultiHeadAttentionLearner, head_recovery_error

warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
truth = AttentionLayer(*(data[name] for name in ("attention", "projection")))
small = slice(0, 300)
MultiHeadAttentionLearner(1, random_state=0).fit(data["X"][small], data["y"][small])
began = time.perf_counter()
learner = MultiHeadAttentionLearner(random_state=0).fit(data["X"], data["y"])
seconds = time.perf_counter() - began
stages = {name: stage.seconds for name, stage in learner.stages_.items()}
error = head_recovery_error(truth, learner.layer_)
print(json.dumps({"fit": seconds, "stages": stages, "error": error}))
"""


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        command = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*command, "add", "--detach", str(path), commit], check=True, capture_output=True)
        try:
            yield path
        finally:
            subprocess.run([*command, "remove", "--force", str(path)], check=True, capture_output=True)


def fit(package: Path, data: Path, limit: float) -> dict[str, Any]:
    """Fit in a process of its own; a fit that takes too long has no stages."""
    environment = os.environ | {"PYTHONPATH": str(package)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", FIT, str(data)],
            env=environment,
            cwd=package,
            capture_output=True,
            text=True,
            check=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"fit": float("inf"), "stages": {}, "error": float("inf")}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(configuration: Configuration, before: Path, repeats: int, limit: float) -> dict[str, Record]:
    """Fit with either version by turns; return the fastest fit of each."""
    X, y, truth = configuration.draw(0)
    best: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, X=X, y=y, attention=truth.attention, projection=truth.projection)
        for _ in range(repeats):
            for version, package in (("before", before), ("now", ROOT)):
                if version in best and not np.isfinite(best[version]["fit"]):
                    continue
                result = fit(package, data, limit)
                if version not in best or result["fit"] < best[version]["fit"]:
                    best[version] = result
    return best


def _cell(record: Record, stage: str) -> str:
    if not record["stages"]:
        return ""
    if stage == "rest":
        return f"{record['fit'] - sum(record['stages'].values()):.3f}"
    return f"{record['stages'][stage]:.3f}" if stage in record["stages"] else ""


def table(records: Records, configurations: Sequence[Configuration], commit: str, limit: float) -> str:
    """Return the page's table."""
    rows = []
    for configuration in configurations:
        for version in ("before", "now"):
            record = records.find(configuration=configuration.name, version=version, commit=commit)
            if record is None:
                continue
            whole = f"{record['fit']:.2f}" if record["stages"] else f"over {limit:g}"
            error = f"{record['error']:.0e}" if record["stages"] else ""
            cells = [_cell(record, stage) for stage in (*STAGES, "rest")]
            rows.append([configuration.name, str(configuration.n_samples), version, *cells, whole, error])
    head = ["(m, k, d, s)", "samples", "", *STAGES, "rest", "whole fit", "error"]
    text = (
        "Seconds of the fastest of several fits on the same samples, the number of heads unknown: before, in "
        f"the first version that learned a layer end to end ({commit}), and now. The rest is what is not a "
        "stage: checking and ordering the samples, the certificate, standard errors. "
        + machine("numpy", "scipy")
    )
    return "\n\n".join([text, markdown(head, rows)])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configurations", nargs="+", metavar="NAME", default=_DEFAULT)
    parser.add_argument("--before", default=FIRST, help=f"commit of the earlier version (default {FIRST})")
    parser.add_argument("--repeats", type=int, default=3, help="fits of each version (default 3)")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of a fit (default 120)")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print the table."""
    options = parse(argv)
    records = Records(options.into / "stages.jsonl", ("configuration", "version", "commit"))
    configurations = chosen(options.configurations)

    def known(configuration: Configuration) -> bool:
        key = {"configuration": configuration.name, "version": "now", "commit": options.before}
        return not options.fresh and records.find(**key) is not None

    missing = [configuration for configuration in configurations if not known(configuration)]
    if missing:
        with checked_out(options.before) as before:
            for configuration in missing:
                for version, record in measure(configuration, before, options.repeats, options.limit).items():
                    key = {"configuration": configuration.name, "version": version, "commit": options.before}
                    records.add(key | record)
    write("stages_before_after", table(records, configurations, options.before, options.limit), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
