"""
The exponential wall
====================

No method learns every layer: the paper proves that the worst case costs exponentially many samples or
steps in the number of heads. ``structure="parity"`` draws layers of that kind. This page shows why they
are hard, what happens when one tries, and how a fit that found nothing says so.
"""

# %%
# What is hidden
# --------------
# All heads of a parity layer look at the same set of query features, one for every head, and their
# outputs cancel but for a sign: the parity of that set. Expanding the labels in products of
# input bits, exactly, over all inputs, shows where the power is: in products that contain none of the
# set, which do not betray it, and in products that contain all of it. Whoever looks for the set
# by correlating labels with few bits finds nothing. A generic layer shows any set of its features in
# products with one of them already.
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

HEADS = [1, 2, 3, 4]


def power_by_degree(layer, features):
    """Share of the first row's power in products with 0, 1, ... of the query features given."""
    n_bits = 2 * layer.n_features
    bits = (np.arange(2**n_bits)[:, None] >> np.arange(n_bits)) & 1
    tokens = (1 - 2 * bits).astype(np.int8).reshape(-1, 2, layer.n_features)
    coefficients = layer.predict(tokens)[:, 0]
    for bit in range(n_bits):
        pairs = coefficients.reshape(-1, 2, 2**bit, layer.n_outputs)
        coefficients = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
    power = (coefficients.reshape(2**n_bits, -1) ** 2).sum(axis=1)
    degree = bits[:, features].sum(axis=1)
    return np.bincount(degree, weights=power, minlength=len(features) + 1) / power.sum()


figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True, sharey=True, layout="constrained")
for ax, structure in zip(axes, ("incoherent", "parity"), strict=True):
    for place, m in enumerate(HEADS[1:]):
        layer = BooleanAttentionSampler(
            m, 2, 7, attention_scale=4.0, structure=structure, random_state=0
        ).layer_
        # In a parity layer the rows of the set are those that every head fills in the first column.
        hidden = np.argsort(-np.abs(layer.attention[:, 1:, 0]).min(axis=0))[:m] + 1
        shares = power_by_degree(layer, hidden)
        ax.bar(np.arange(m + 1) + 0.27 * (place - 1), shares, width=0.25, label=f"{m} heads")
    ax.set(title=f"{structure} layers", xlabel="features of the set in the product")
    ax.set_xticks(range(5))
axes[0].set_ylabel("share of the label power")
axes[0].legend(frameon=False)
plt.show()

# %%
# Trying
# ------
# The same effort for parity layers and for generic ones: two tokens of twelve features, 1,000 samples,
# the number of heads given, two random starts of fifteen steps. The error is that of predictions on
# new samples.
SEEDS = range(3)
errors = {structure: np.empty((len(HEADS), len(SEEDS))) for structure in ("incoherent", "parity")}
verdicts = {}
for structure, table in errors.items():
    for row, m in enumerate(HEADS):
        for seed in SEEDS:
            sampler = BooleanAttentionSampler(m, 2, 12, structure=structure, random_state=seed)
            X, y = sampler.sample(1000)
            learner = MultiHeadAttentionLearner(
                n_heads=m, n_tokens=2, heads_starts=2, max_iter=15, random_state=0
            )
            with warnings.catch_warnings():
                # It says that the steps ended before they had converged. So they did.
                warnings.simplefilter("ignore", ConvergenceWarning)
                learner.fit(X, y)
            X_new, y_new = sampler.sample(1000)
            table[row, seed] = np.mean((learner.predict(X_new) - y_new) ** 2) / np.mean(y_new**2)
            verdicts[structure, m] = learner.certificate_.verdict

figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
for offset, (structure, table), marker in zip((-0.06, 0.06), errors.items(), "os", strict=True):
    places = np.repeat(np.array(HEADS)[:, None] + offset, len(SEEDS), axis=1)
    ax.semilogy(
        places.ravel(), np.maximum(table, 1e-32).ravel(), marker, label=f"{structure} layers", alpha=0.7
    )
ax.axhline(1.0, color="0.5", linestyle=":", linewidth=1)
ax.text(4.3, 1.6, "predicting zero", color="0.5", ha="right", va="bottom", fontsize="small")
ax.set(xlabel="number of heads", ylabel="relative squared error on new samples", xticks=HEADS)
ax.set(ylim=(1e-33, 1e4), xlim=(0.6, 4.4), title="Three layers of each kind, one fit each")
ax.grid(axis="y", color="0.92")
ax.legend(frameon=False, loc="center right")
plt.show()

# %%
# What a further head costs
# -------------------------
# With eight features there are few enough inputs for persistence to pay. How many samples does it take,
# doubling them from the information limit, until new ones are predicted, and until the heads are the true
# ones? A quick version of what ``examples/benchmarks/hardness.py`` measures, with fewer starts and up to
# 512 samples; hollow marks say that these did not do. Lines are fitted to the logarithms of what was reached.
MOST = 512
goals = {"until new samples are predicted": {}, "until the heads are recovered": {}}
for structure in ("incoherent", "parity"):
    for m in HEADS:
        n, reached = 2 ** int(np.ceil(np.log2(8.5 * m))), [None, None]
        while n <= MOST and None in reached:
            sampler = BooleanAttentionSampler(m, 2, 8, structure=structure, random_state=0)
            X, y = sampler.sample(n)
            learner = MultiHeadAttentionLearner(
                n_heads=m, n_tokens=2, heads_starts=4, max_iter=40, random_state=0
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                learner.fit(X, y)
            X_new, y_new = sampler.sample(1000)
            missed = [
                np.mean((learner.predict(X_new) - y_new) ** 2) / np.mean(y_new**2),
                head_recovery_error(sampler.layer_, learner.layer_),
            ]
            reached = [
                n if before is None and error <= 1e-6 else before
                for before, error in zip(reached, missed, strict=True)
            ]
            n *= 2
        for goal, value in zip(goals.values(), reached, strict=True):
            goal[structure, m] = value

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for ax, (title, goal) in zip(axes, goals.items(), strict=True):
    for structure, marker, shift in (("incoherent", "o", -0.05), ("parity", "s", 0.05)):
        found = [m for m in HEADS if goal[structure, m]]
        lost = [m for m in HEADS if not goal[structure, m]]
        label, color = f"{structure}: {len(lost)} of {len(HEADS)} not reached", "C0" if shift < 0 else "C1"
        if len(found) > 1:
            slope, start = np.polyfit(found, np.log2([goal[structure, m] for m in found]), 1)
            ax.plot(found, 2 ** (start + slope * np.array(found)), color=color, alpha=0.4)
            label = f"{structure}: times {2**slope:.1f} a head" + (
                f", {len(lost)} not reached" if lost else ""
            )
        ax.plot(
            np.array(found) + shift, [goal[structure, m] for m in found], marker, color=color, label=label
        )
        ax.plot(np.array(lost) + shift, [MOST] * len(lost), marker, color=color, fillstyle="none")
    ax.set_yscale("log", base=2)
    ax.set(xlabel="number of heads", title=title, xticks=HEADS, ylim=(8, 4 * MOST))
    ax.legend(frameon=False, loc="upper left", fontsize="small")
axes[0].set_ylabel("samples")
plt.show()

# %%
# How a failure shows
# -------------------
# A fit that did not find the layer still returns its best, and its certificate does not call it
# identified. The last fit of each kind:
for (structure, m), verdict in verdicts.items():
    print(f"{structure:>10}, {m} heads: {verdict}")

# %%
# Predicting is not finding
# -------------------------
# With eight features the inputs are so few that samples show nearly every query, and persistence pays:
# the labels are predicted to rounding. The heads are still not the true ones. The labels of a parity
# layer take few values, and other heads add up to the same; the certificate knows that as well.
sampler = BooleanAttentionSampler(2, 2, 8, structure="parity", random_state=0)
X, y = sampler.sample(2000)
learner = MultiHeadAttentionLearner(n_heads=2, n_tokens=2, random_state=0).fit(X, y)
X_new, y_new = sampler.sample(2000)
print(f"largest error on new samples: {np.abs(learner.predict(X_new) - y_new).max():.1e}")
print(f"recovery error of the heads:  {head_recovery_error(sampler.layer_, learner.layer_):.1e}")
print(learner.certificate_.verdict)
