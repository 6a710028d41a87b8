"""Stages 1 and 3: the error of the sum of projections against the number of samples."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner

SIZES = [500, 1500, 5000, 15_000]
SEEDS = range(3)
LABELS = {"crude_sum": "crude sum", "refine_sum": "refined sum"}
errors = {name: np.empty((len(SEEDS), len(SIZES))) for name in LABELS}
for seed in SEEDS:
    sampler = BooleanAttentionSampler(2, 4, 10, attention_scale=1.0, random_state=seed)
    X, y = sampler.sample(SIZES[-1])
    total = sampler.layer_.projection.sum(axis=0)
    for column, size in enumerate(SIZES):
        learner = MultiHeadAttentionLearner(n_heads=2, n_tokens=4, stage_samples=size, random_state=0)
        stages = learner.fit(X[:size], y[:size]).stages_
        for name, table in errors.items():
            table[seed, column] = np.linalg.norm(stages[name].total - total) / np.linalg.norm(total)

figure, ax = plt.subplots(figsize=(5.8, 3.6), layout="constrained")
for name, table in errors.items():
    (line,) = ax.loglog(
        SIZES,
        np.median(table, axis=0),
        "o-",
        label=LABELS[name],
    )
    ax.fill_between(
        SIZES, table.min(axis=0), table.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0
    )
ax.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
ax.minorticks_off()
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2]
ax.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
ax.set(xlabel="number of samples", ylabel="relative error of the sum")
ax.set_title(
    "Two heads, four tokens, ten features, scale 1:\nmedian and range of three layers", fontsize="medium"
)
ax.grid(color="0.92")
ax.legend(frameon=False)
