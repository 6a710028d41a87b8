"""
What each stage sees
====================

The learner works in stages, each with a better idea of the layer than the one before. Here the
layer is known, so that every stage can be held against the truth.
"""

# %%
# Three heads on three tokens, at a scale where attention is soft and the heads agree on some
# rows by chance: the setting that the first stages are made for.
import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.plotting import StageDisplay

sampler = BooleanAttentionSampler(n_heads=3, n_tokens=3, n_features=10, attention_scale=1.0, random_state=0)
X, y = sampler.sample(20_000)
learner = MultiHeadAttentionLearner(n_tokens=3, stage_samples=20_000, random_state=0).fit(X, y)
stages, truth = learner.stages_, sampler.layer_
print(stages)

# %%
# Seconds and errors
# ------------------
# The sums, the heads and the polished heads are compared as matrices. The sculpted directions and
# the span are compared as spaces: the sine of the angle between the true matrices, or their
# differences, and the space. Ten digits out of the last stage do not need ten digits in the
# earlier ones, only a start near enough.
StageDisplay.from_estimator(learner, true_layer=truth)
plt.show()

# %%
# The sum of the projections
# --------------------------
# The crude sum regresses the mean label on the mean token. It is biased: attention picks tokens
# that correlate with the query, and more samples do not help. The refined sum regresses on rows
# where all heads share one pattern, which is what an exact row looks like.
total = truth.projection.sum(axis=0)
estimates = [("crude", stages["crude_sum"].total), ("refined", stages["refine_sum"].total)]
figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
limit = 1.05 * np.abs(total).max()
for ax, (name, estimate) in zip(axes, estimates, strict=True):
    error = np.linalg.norm(estimate - total) / np.linalg.norm(total)
    ax.plot([-limit, limit], [-limit, limit], color="0.7", linewidth=1)
    ax.plot(total.ravel(), estimate.ravel(), ".")
    ax.set(title=f"{name} sum: relative error {error:.3f}", xlabel="entry of the true sum", aspect="equal")
axes[0].set_ylabel("estimated entry")
plt.show()

# %%
# The sculpted body
# -----------------
# A row on which all heads agree gives linear equations that hold for every head, and so for the
# whole affine hull of the attention matrices. Three heads span a plane, so two directions are free:
# the two smallest eigenvalues of the equalities stand apart.
sculpture = stages["sculpt"]
print(sculpture.message)
body = sculpture.body
# Internal units, in which tokens are white; Boolean tokens almost are already.
inside = [body.violation(body.units.attention_in(theta[None]).ravel()) for theta in truth.attention]
print("violation of the body by the true heads, up to 1 is inside:", np.round(inside, 2))

figure, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
values = sculpture.eigenvalues
ax.plot(np.arange(1, len(values) + 1), values, "o")
ax.plot([1, 2], values[:2], "o", color="tab:orange", label="free directions of three heads")
ax.set(xlabel="index", ylabel="eigenvalue of the equalities", title="Certified equalities", ylim=(0, None))
ax.legend(frameon=False, loc="lower right")
plt.show()

# %%
# The span
# --------
# How much of each true attention matrix lies in the span that stage 4 hands on:
span = stages["span"]
basis = span.basis.reshape(len(span.basis), -1)
cosines = [np.linalg.norm(basis @ theta.ravel()) / np.linalg.norm(theta) for theta in truth.attention]
print(f"source {span.source}, {len(basis)} directions, cosines {np.round(cosines, 3)}")
