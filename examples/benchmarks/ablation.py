"""What each source adds: the default, the paper's stages alone, one source at a time, chance alone.

Generic layers and hard ones, without noise, the number of heads given. A fit has succeeded if its recovery
error is at most 1e-8; without polish, which ends at per cents, if it is at most 0.3, which is near enough for
a polish to start from. Seconds are those of the stages, from the crude sum to the polish; input checks and
the certificate are left out, since chance alone is not run through the estimator: it calls the search with a
span that has no frames, then the polish.

    python examples/benchmarks/ablation.py
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
from threadpoolctl import threadpool_limits

from sklearn_mhal import (
    AttentionLayer,
    BooleanAttentionSampler,
    MultiHeadAttentionLearner,
    head_recovery_error,
)
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import Span, find_heads, polish

# m, k, d, s, structure, samples; the generic ones are sizes of the bank that the tests solve.
LAYERS = {
    "generic (2,2,6,1)": (2, 2, 6, 1.0, "incoherent", 2000),
    "generic (2,4,8,2)": (2, 4, 8, 2.0, "incoherent", 2000),
    "generic (2,3,8,4)": (2, 3, 8, 4.0, "incoherent", 2000),
    "generic (3,3,10,1)": (3, 3, 10, 1.0, "incoherent", 2000),
    "generic (4,3,6,1)": (4, 3, 6, 1.0, "incoherent", 2000),
    "generic (4,4,12,4)": (4, 4, 12, 4.0, "incoherent", 2000),
    "generic (4,4,16,8)": (4, 4, 16, 8.0, "incoherent", 4000),
    "generic (6,4,8,8)": (6, 4, 8, 8.0, "incoherent", 4000),
    "low rank (4,4,12,4)": (4, 4, 12, 4.0, "low_rank", 2000),
    "correlated (3,4,10,1)": (3, 4, 10, 1.0, "correlated", 2000),
    "multiscale (4,4,12,4)": (4, 4, 12, 4.0, "multiscale", 2000),
    "hard attention (2,3,8,16)": (2, 3, 8, 16.0, "incoherent", 4000),
    "parity (1,2,8,2)": (1, 2, 8, 2.0, "parity", 1000),
    "parity (2,2,8,2)": (2, 2, 8, 2.0, "parity", 1000),
    "parity (3,2,8,2)": (3, 2, 8, 2.0, "parity", 1000),
}
CHANCE = "chance alone"
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "no polish": {"polish": False},
    "sculpt alone": {"span": "sculpt"},
    "moments alone": {"span": "moments"},
    CHANCE: {},
}
EXACT, NEAR = 1e-8, 0.3


def by_chance(X: Any, y: Any, m: int, k: int, seed: int) -> tuple[AttentionLayer, float]:
    """Search from random starts only; return the layer and the seconds."""
    n, d = len(X), X.shape[1] // k
    generator = np.random.default_rng(seed)
    nothing = Span(
        source="none",
        basis=np.empty((0, d, d)),
        origin=np.zeros((d, d)),
        singular_values=np.empty(0),
        n_heads=None,
        frames=(),
        exclusive=False,
        n_samples=0,
        message="",
    )
    with threadpool_limits(1, user_api="blas"), np.errstate(invalid="ignore"):
        examples = make_examples(
            X.reshape(n, k, d), y.reshape(n, k, -1), fit_intercept=True, random_state=generator
        )
        heads = find_heads(examples, nothing, n_heads=m, n_starts=20, generator=generator)
        polished = polish(examples, heads.attention, noisy=not heads.exact, n_idle=heads.n_idle)
    return polished.layer, heads.seconds + polished.seconds


def measure(layer: str, way: str, seed: int) -> Record:
    """Fit once."""
    m, k, d, s, structure, n = LAYERS[layer]
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=s, structure=structure, random_state=seed)
    X, y = sampler.sample(n)
    source, identified = "random", False
    with warnings.catch_warnings():
        # A fit that fell short says so; here that is what is counted.
        warnings.simplefilter("ignore")
        if way == CHANCE:
            found, seconds = by_chance(X, y, m, k, seed)
        else:
            learner = MultiHeadAttentionLearner(m, n_tokens=k, random_state=seed, **WAYS[way]).fit(X, y)
            found, source = learner.layer_, learner.stages_["heads"].source
            seconds = sum(stage.seconds for stage in learner.stages_.values())
            identified = learner.certificate_.identified
    error = head_recovery_error(sampler.layer_, found)
    return {
        "error": error,
        "seconds": seconds,
        "source": source,
        "found": error <= (EXACT if WAYS[way].get("polish", True) else NEAR),
        "identified": identified,
    }


def page(records: Records) -> str:
    """Return the table."""
    rows = []
    for layer in LAYERS:
        row = [layer]
        for way in WAYS:
            found = [r for r in records if (r["layer"], r["way"]) == (layer, way)]
            if not found:
                row.append("")
                continue
            seconds = statistics.median(record["seconds"] for record in found)
            row.append(f"{sum(record['found'] for record in found)} of {len(found)}, {seconds:.2f} s")
        rows.append(row)
    total = ["all"]
    for way in WAYS:
        found = [r for r in records if r["way"] == way]
        total.append(f"{sum(record['found'] for record in found)} of {len(found)}")
    sources = [r["source"] for r in records if r["way"] == "default"]
    won = ", ".join(f"{name} {sources.count(name)}" for name in sorted(set(sources)))
    certified = [r for r in records if r["way"] not in (CHANCE, "no polish")]
    lost = [r for r in certified if r["error"] > 1e-6]
    wrong = sum(r["identified"] for r in lost)
    return "\n\n".join(
        [
            "Fits that found the layer and median seconds of the stages, the number of heads given, no "
            "noise; other work went on meanwhile, so seconds tell orders of magnitude. "
            f"Without polish a layer counts as found at a recovery error of {NEAR:g}, else at {EXACT:g}. "
            + machine("numpy", "scipy"),
            markdown(["layer (m,k,d,s)", *WAYS], [*rows, total]),
            f"The winning source of the {len(sources)} default fits: {won}. Of {len(lost)} polished fits "
            f"with a certificate that are not the layer to 1e-6, {wrong} were called identified.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--into", type=Path, default=TABLES, help="folder of the table and the results")
    options = parser.parse_args(argv)
    records = Records(options.into / "ablation.jsonl", ("layer", "way", "seed"))
    for seed in range(options.seeds):
        for layer in LAYERS:
            for way in WAYS:
                key = {"layer": layer, "way": way, "seed": seed}
                if records.find(**key) is None:
                    records.add(key | measure(layer, way, seed))
                    print(records.find(**key), file=sys.stderr, flush=True)
    write("ablation", page(records), options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
