"""Where the time of a fit goes, and how close its products are to what the machine can do.

The solver's parts are timed inside whole fits with default settings, the search's and the polish's apart; of
several fits the fastest counts. The rate of its products with the Gauss-Newton matrix is that of their
multiplications and additions, next to the rate of one large product of matrices in single precision on as
many threads: what no code on this machine can beat.

    python examples/benchmarks/breakdown.py
    python examples/benchmarks/breakdown.py --configurations 3 7 --threads 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

_THREADS = 2
for _pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_pool, str(_THREADS))

import numpy as np  # noqa: E402
from _configurations import Configuration, chosen  # noqa: E402
from _records import TABLES, Record, Records, machine, markdown, write  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

from sklearn_mhal import MultiHeadAttentionLearner  # noqa: E402
from sklearn_mhal._linearisation import Linearisation  # noqa: E402
from sklearn_mhal._problem import Problem  # noqa: E402

_DEFAULT = ["(2,4,10,2)", "(4,4,16,2)", "(8,8,32,4)", "real heads d'=16", "real heads d'=32"]
EARLY = ("crude_sum", "refine_sum", "sculpt", "span")
# Kind, owner, name: what a solver step consists of.
PARTS = (
    ("products", Linearisation, "product"),
    ("equations", Linearisation, "__init__"),
    ("projections", Problem, "evaluate"),
)
KINDS = tuple(what for what, _, _ in PARTS)
SOLVING = ("heads", "polish")
_LARGE = 2048


class Stopwatch:
    """Seconds by (where, what), and the operations of the products."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.operations = 0
        self.where = ""

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed while a solver runs."""

        def run(first: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.where:
                return function(first, *arguments, **keywords)
            if what == "products":
                self.operations += operations(first)
            began = time.perf_counter()
            result = function(first, *arguments, **keywords)
            self.seconds[self.where, what] += time.perf_counter() - began
            return result

        return run

    def solver(self, where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the solver, its time noted as that of a stage."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            self.where, began = where, time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds[where, "solver"] += time.perf_counter() - began
                self.where = ""

        return run

    @contextmanager
    def watching(self) -> Iterator[Stopwatch]:
        """Time what runs meanwhile."""
        with ExitStack() as stack:
            for what, owner, name in PARTS:
                timed = self.timed(what, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            for where in SOLVING:
                module = import_module(f"sklearn_mhal.stages.{where}")
                solver = self.solver(where, module.solve)
                stack.enter_context(mock.patch.object(module, "solve", solver))
            yield self


def operations(linear: Linearisation) -> int:
    """Return the multiplications and additions of a product with the Gauss-Newton matrix."""
    rows, size = linear.problem.rows, len(linear.block)
    n_outputs = linear.problem.labels.shape[1]
    n_queries, width = rows.queries.shape
    own = size * rows.n_tokens + size // rows.n_features * rows.n_tokens * n_outputs
    n_columns = linear.state.regression.design.shape[1]
    return 2 * 2 * (n_queries * (width * size + own) + rows.n_rows * n_columns * n_outputs)


def large_product(n_threads: int) -> float:
    """Return the operations a second of a large product of matrices in single precision."""
    matrix = np.ones((_LARGE, _LARGE), dtype=np.float32)
    best = np.inf
    with threadpool_limits(n_threads, user_api="blas"):
        for _ in range(6):
            began = time.perf_counter()
            _ = matrix @ matrix
            best = min(best, time.perf_counter() - began)
    return 2.0 * _LARGE**3 / best


def measure(configuration: Configuration, *, given: bool, n_threads: int, repeats: int) -> Record:
    """Return the parts of the fastest of several fits."""
    X, y, truth = configuration.draw(0)
    learner = MultiHeadAttentionLearner(truth.n_heads if given else "auto", random_state=0)
    best: Record = {"fit": np.inf}
    with threadpool_limits(n_threads, user_api="blas"):
        for _ in range(repeats):
            with Stopwatch().watching() as watch:
                began = time.perf_counter()
                learner.fit(X, y)
                fit = time.perf_counter() - began
            if fit < best["fit"]:
                products = sum(watch.seconds[where, "products"] for where in SOLVING)
                best = {
                    "fit": fit,
                    "stages": {name: stage.seconds for name, stage in learner.stages_.items()},
                    "certificate": learner.certificate_.seconds,
                    "solver": {"/".join(key): value for key, value in watch.seconds.items()},
                    "rate": watch.operations / products,
                }
    return best | {"large": large_product(n_threads)}


def table(records: Records, n_threads: int) -> str:
    """Return the page's table."""
    rows = []
    for record in records:
        if record["threads"] != n_threads:
            continue
        fit, stages = record["fit"], record["stages"]
        solver = {
            what: sum(record["solver"][f"{where}/{what}"] for where in SOLVING) for what in ("solver", *KINDS)
        }
        parts = [
            sum(stages[name] for name in EARLY),
            stages["heads"],
            stages["polish"],
            record["certificate"],
            fit - sum(stages.values()) - record["certificate"],
        ]
        whole = solver.pop("solver")
        cells = [_share(part, fit) for part in parts]
        cells += [_share(part, whole) for part in (*solver.values(), whole - sum(solver.values()))]
        cells += [f"{record[name] / 1e9:.0f}" for name in ("rate", "large")]
        setting = "given" if record["given"] else "counted"
        rows.append([record["configuration"], setting, f"{fit:.2f}", *cells])
    head = ["(m, k, d, s)", "heads", "fit, s", "stages 1-4", "search", "polish", "certificate", "rest"]
    head += [f"solver: {what}" for what in (*KINDS, "rest")]
    head += ["products, GFLOP/s", "large product, GFLOP/s"]
    text = (
        "The fastest of several fits, and shares of it; then shares of the solver's time, in the search and "
        "the polish together: products with the Gauss-Newton matrix, what a step's equations need before "
        "(basis, gradient, preconditioner), forward passes with their projections, and the rest. Last, the "
        "rate of those products, in single precision, and that of one large product of matrices. "
        f"At most {n_threads} threads. " + machine("numpy", "scipy")
    )
    return "\n\n".join([text, markdown(head, rows)])


def _share(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:.0f} %"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configurations", nargs="+", metavar="NAME", default=_DEFAULT)
    parser.add_argument("--threads", type=int, default=_THREADS, help=f"most threads (default {_THREADS})")
    parser.add_argument("--repeats", type=int, default=5, help="fits of each (default 5)")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print the table."""
    options = parse(argv)
    records = Records(options.into / "breakdown.jsonl", ("configuration", "given", "threads"))
    X, y, _ = chosen(["(2,4,10,2)"])[0].draw(0)
    MultiHeadAttentionLearner(2, random_state=0).fit(X[:500], y[:500])
    for configuration in chosen(options.configurations):
        for given in (False, True):
            key = {"configuration": configuration.name, "given": given, "threads": options.threads}
            found = measure(configuration, given=given, n_threads=options.threads, repeats=options.repeats)
            records.add(key | found)
    write("breakdown", table(records, options.threads), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
