"""What each source adds: the default, the paper's stages alone, one source at a time, chance alone.

Generic layers and hard ones, without noise, the number of heads given. A fit has succeeded if its recovery
error is at most 1e-8; without polish, which ends at per cents, if it is at most 0.3 and so in reach of one.

    python examples/benchmarks/ablation.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from _records import TABLES, Record, Records, machine, markdown, write

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

# m, k, d, s, structure, samples
LAYERS = {
    "generic (2,4,8,2)": (2, 4, 8, 2.0, "incoherent", 2000),
    "generic (3,3,10,1)": (3, 3, 10, 1.0, "incoherent", 2000),
    "generic (4,4,12,4)": (4, 4, 12, 4.0, "incoherent", 2000),
    "low rank (4,4,12,4)": (4, 4, 12, 4.0, "low_rank", 2000),
    "correlated (3,4,10,1)": (3, 4, 10, 1.0, "correlated", 2000),
    "multiscale (4,4,12,4)": (4, 4, 12, 4.0, "multiscale", 2000),
    "hard attention (2,3,8,16)": (2, 3, 8, 16.0, "incoherent", 4000),
    "parity (1,2,8,2)": (1, 2, 8, 2.0, "parity", 1000),
    "parity (2,2,8,2)": (2, 2, 8, 2.0, "parity", 1000),
    "parity (3,2,8,2)": (3, 2, 8, 2.0, "parity", 1000),
}
# Without a single stage sample to agree no source has anything to say, and chance is all there is.
WAYS = {
    "default": {},
    "no polish": {"polish": False},
    "sculpt alone": {"span": "sculpt"},
    "moments alone": {"span": "moments"},
    "chance alone": {"span": "sculpt", "stage_samples": 1, "sculpt_tolerance": 1e-300},
}
EXACT, NEAR = 1e-8, 0.3


def measure(layer: str, way: str, seed: int) -> Record:
    """Fit once."""
    m, k, d, s, structure, n = LAYERS[layer]
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=s, structure=structure, random_state=seed)
    X, y = sampler.sample(n)
    learner = MultiHeadAttentionLearner(m, n_tokens=k, random_state=seed, **WAYS[way])
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A fit that fell short says so; here that is what is counted.
        warnings.simplefilter("ignore")
        learner.fit(X, y)
    seconds = time.perf_counter() - began
    error = head_recovery_error(sampler.layer_, learner.layer_)
    return {
        "error": error,
        "seconds": seconds,
        "source": learner.stages_["heads"].source,
        "found": error <= (EXACT if WAYS[way].get("polish", True) else NEAR),
        "identified": learner.certificate_.identified,
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
    wrong = sum(r["identified"] and r["error"] > 1e-6 for r in records)
    return "\n\n".join(
        [
            "Fits that found the layer and median seconds, the number of heads given, no noise. Without "
            f"polish a layer counts as found at a recovery error of {NEAR:g}, else at {EXACT:g}. "
            + machine("numpy", "scipy"),
            markdown(["layer", *WAYS], rows),
            f"Fits called identified that were not the layer: {wrong}.",
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
