"""
Noise and error bars
====================

Without noise a layer is found to rounding. With noise the question is how far from the truth the
answer is, and whether the learner knows. This page measures both: how the error falls with the
number of samples and the noise, and how often the error bars that come with a fit hold the truth.
"""

# %%
# Error against samples and noise
# -------------------------------
# One layer of two heads, four tokens and six features. Noise is given relative to the standard
# deviation of the labels; every sample shows all four output rows. The fit ends at the least-squares
# solution on all samples, whose error is proportional to the noise and to one over the root of the
# number of samples.
import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error
from sklearn_mhal.metrics import match_heads

SHAPE = dict(n_heads=2, n_tokens=4, n_features=6, random_state=0)
label_std = BooleanAttentionSampler(**SHAPE).label_std_
sizes = np.array([200, 600, 2000, 6000])
levels = [0.01, 0.1, 0.5]

errors = np.empty((len(levels), len(sizes)))
for row, level in enumerate(levels):
    for column, size in enumerate(sizes):
        sampler = BooleanAttentionSampler(**SHAPE, noise_std=level * label_std)
        learner = MultiHeadAttentionLearner(n_heads=2, n_tokens=4, random_state=0).fit(*sampler.sample(size))
        errors[row, column] = head_recovery_error(sampler.layer_, learner.layer_)

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
for level, line in zip(levels, errors, strict=True):
    (points,) = ax.loglog(sizes, line, "o", label=f"noise {level:g}")
    middle = np.exp(np.mean(np.log(line * np.sqrt(sizes))))
    ax.loglog(sizes, middle / np.sqrt(sizes), color=points.get_color(), linewidth=1)
ax.plot([], [], color="0.4", linewidth=1, label=r"proportional to $1/\sqrt{n}$")
ax.set(xlabel="number of samples $n$", ylabel="recovery error", title="Largest relative error of any head")
ax.set_xticks(sizes, [f"{size}" for size in sizes])
ax.minorticks_off()
ax.grid(color="0.92")
ax.legend(frameon=False, ncols=2)
ax.set_ylim(errors.min() / 2, 6 * errors.max())
plt.show()

# %%
# The exponents of :math:`n`, fitted by least squares in logarithms; -0.5 is the root:
for level, line in zip(levels, errors, strict=True):
    print(f"noise {level:4g}: {np.polyfit(np.log(sizes), np.log(line), 1)[0]:.2f}")

# %%
# Error bars
# ----------
# With noise, a fit has a standard error for every entry, from the information matrix at the solution
# and the noise that the residual shows. The truth should lie within 1.96 of them for 95 % of entries.
sampler = BooleanAttentionSampler(**SHAPE, noise_std=0.2 * label_std)
X, y = sampler.sample(2000)
learner = MultiHeadAttentionLearner(n_tokens=4, random_state=0).fit(X, y)
print(f"heads found: {learner.n_heads_}")
print(f"noise: {learner.noise_std_:.4f} estimated, {sampler.noise_std:.4f} true")

# %%
# Heads come in no particular order, so they are matched to the true ones first.
order = match_heads(sampler.layer_, learner.layer_)
truth = sampler.layer_.attention.ravel()
found = learner.attention_matrices_[order].ravel()
bars = 1.96 * learner.attention_std_errors_[order].ravel()
missed = np.abs(found - truth) > bars

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=[2, 1])
ranked = np.argsort(truth)
places = np.arange(len(ranked))
deviation, bars, missed = (found - truth)[ranked], bars[ranked], missed[ranked]
axes[0].axhline(0.0, color="0.4", linewidth=1)
for chosen, colour, label in ((~missed, "tab:blue", "holds the truth"), (missed, "tab:orange", "misses it")):
    axes[0].errorbar(
        places[chosen], deviation[chosen], bars[chosen],
        fmt="o", markersize=3, linewidth=1, color=colour, label=f"{label}: {chosen.sum()}",
    )  # fmt: skip
axes[0].set(xlabel="entry of the attention matrices, by size", ylabel="found minus true")
axes[0].set_title("95 % intervals")
axes[0].legend(frameon=False, ncols=2)
axes[0].set_ylim(1.35 * np.array([-1, 1]) * np.max(np.abs(deviation) + bars))

grid = np.linspace(-4, 4, 200)
axes[1].hist(1.96 * deviation / bars, bins=np.linspace(-4, 4, 17), density=True, color="tab:blue", alpha=0.5)
axes[1].plot(grid, np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi), color="0.3", label="standard normal")
axes[1].set(xlabel="error in standard errors", ylabel="density", title="Errors against their bars")
axes[1].set_ylim(0, 0.62)
axes[1].legend(frameon=False)
plt.show()

# %%
# One fit has few entries to count. Over ten fits to fresh samples of the same layer:
inside = total = 0
for seed in range(10):
    fresh = BooleanAttentionSampler(
        n_tokens=4, layer=sampler.layer_, noise_std=sampler.noise_std, random_state=seed
    )
    learner = MultiHeadAttentionLearner(n_heads=2, n_tokens=4, random_state=0).fit(*fresh.sample(1000))
    order = match_heads(sampler.layer_, learner.layer_)
    gap = np.abs(learner.attention_matrices_[order] - sampler.layer_.attention)
    inside += np.count_nonzero(gap <= 1.96 * learner.attention_std_errors_[order])
    total += gap.size
print(f"{inside} of {total} intervals hold the truth: {inside / total:.1%}")
