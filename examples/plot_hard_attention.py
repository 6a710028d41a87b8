"""
Hard attention
==============

The larger the attention matrices, the closer every pattern is to one token. A saturated pattern says
little about the matrix behind it: it hardly changes when the matrix does. This page follows the
learner from soft to hard attention and shows what the rows still say there, and which constraints
carry it: the half-spaces.
"""

# %%
# From soft to hard
# -----------------
# Two heads on four tokens; `s` is the Frobenius norm of every attention matrix, which is the standard
# deviation of the logits. Interior rows, on which all heads spread their attention in the same way, are
# equations for the attention matrices; vertex rows, on which all heads look at one and the same token,
# are inequalities.
import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

SCALES = [0.5, 1, 2, 4, 8, 16, 32]
fits = {}
for scale in SCALES:
    sampler = BooleanAttentionSampler(2, 4, 8, attention_scale=scale, random_state=0)
    X, y = sampler.sample(10_000)
    learner = MultiHeadAttentionLearner(n_tokens=4, stage_samples=10_000, random_state=0).fit(X, y)
    saturated = np.mean(learner.attention_weights(X[:1000]).max(axis=3) > 0.98)
    fits[scale] = sampler.layer_, learner, saturated

figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
sculptures = [learner.stages_["sculpt"] for _, learner, _ in fits.values()]
shares = {
    "saturated patterns": [saturated for *_, saturated in fits.values()],
    "rows certified as interior": [s.n_interior / s.n_rows for s in sculptures],
    "rows certified as vertices": [s.n_vertex / s.n_rows for s in sculptures],
}
for (label, share), colour in zip(shares.items(), ("0.5", "tab:blue", "tab:orange"), strict=True):
    ax.plot(SCALES, np.where(np.array(share) > 0, share, np.nan), "o-", color=colour, label=label)
ax.set_xscale("log", base=2)
ax.set_xticks(SCALES, [f"{scale:g}" for scale in SCALES])
ax.set_yscale("log")
ax.set(xlabel="scale $s$ of the attention matrices", ylabel="share", title="What the rows show")
ax.set_ylim(1e-4, 1.3)
ax.grid(axis="y", color="0.92")
ax.legend(frameon=False)
plt.show()

# %%
# Interior rows are never more than a small share, because only the best agreeing ones are kept. Shares
# of zero are not drawn.
#
# What the half-spaces add
# ------------------------
# The body of stage 2 has a point that stands in for the average attention matrix. From the interior
# rows alone, the least-squares centre, it comes out too small and increasingly askew: under hard
# attention the rows that are soft are soft because their logits happen to be small. The point nearest
# to zero that meets the half-spaces as well keeps the direction, and grows with the truth.


def centres(truth, learner):
    """The true average, and the body's point without and with its half-spaces."""
    body = learner.stages_["sculpt"].body
    points = [body.units.attention_out(point.reshape(-1, 8))[0][0] for point in (body.centre, body.anchor())]
    return truth.attention.mean(axis=0), points


cosines, lengths = np.empty((2, len(SCALES))), np.empty((2, len(SCALES)))
for column, (truth, learner, _) in enumerate(fits.values()):
    average, points = centres(truth, learner)
    for row, point in enumerate(points):
        lengths[row, column] = np.linalg.norm(point) / np.linalg.norm(average)
        cosines[row, column] = np.vdot(point, average) / (np.linalg.norm(point) * np.linalg.norm(average))

figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
for row, (label, marker) in enumerate((("interior rows only", "s--"), ("with half-spaces", "o-"))):
    axes[0].plot(SCALES, cosines[row], marker, label=label)
    axes[1].plot(SCALES, lengths[row], marker, label=label)
axes[0].set(title="Direction", ylabel="cosine to the average attention matrix")
axes[1].set(title="Length", ylabel="norm relative to the average", ylim=(0, None))
for ax in axes:
    ax.set_xscale("log", base=2)
    ax.set_xticks(SCALES, [f"{scale:g}" for scale in SCALES])
    ax.set_xlabel("scale $s$ of the attention matrices")
    ax.grid(axis="y", color="0.92")
axes[0].legend(frameon=False)
plt.show()

# %%
# All digits
# ----------
# The last stage picks the samples with the softest patterns, which carry what information on the
# attention there is, and solves on those.
for scale, (truth, learner, saturated) in fits.items():
    error = head_recovery_error(truth, learner.layer_)
    print(f"s = {scale:4g}: {saturated:5.1%} of patterns saturated, recovery error {error:.1e}")
