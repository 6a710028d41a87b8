"""
Counting heads
==============

``n_heads="auto"`` counts the heads of a layer. Two spectra propose a number and samples that were
held out decide. This page shows when the spectra are right, when they are not, and what
the held-out error says in either case.
"""

# %%
# Heads that agree now and then
# -----------------------------
# Soft attention and few tokens: enough rows on which all three heads share a pattern. The interaction
# moments (left) have a gap after the third singular value; the equalities of the agreeing rows
# (middle) leave the plane of three heads free, two directions. Three heads fit the held-out
# rows (right) to rounding, so no other number has to be tried.
import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.plotting import HeadCountDisplay

soft = BooleanAttentionSampler(n_heads=3, n_tokens=3, n_features=10, attention_scale=1.0, random_state=0)
X, y = soft.sample(20_000)
learner = MultiHeadAttentionLearner(n_tokens=3, stage_samples=20_000, random_state=0).fit(X, y)
HeadCountDisplay.from_estimator(learner)
plt.show()

# %%
# Heads of different size
# -----------------------
# Here the largest head is four times the smallest in attention and eight times in projection.
# The largest gap comes after the first head, so the moments propose too few, and hardly a row is
# shared by all four. The search goes on, in growing strides, until the held-out error is that of an exact
# fit of which no head can be left out.
unequal = BooleanAttentionSampler(
    n_heads=4, n_tokens=4, n_features=10, attention_scale=4.0, structure="multiscale", random_state=1
)
X_unequal, y_unequal = unequal.sample(4000)
learner = MultiHeadAttentionLearner(n_tokens=4, random_state=0).fit(X_unequal, y_unequal)
print(f"proposed {learner.stages_['span'].n_heads}, found {learner.n_heads_}")
HeadCountDisplay.from_estimator(learner)
plt.show()

# %%
# With noise
# ----------
# No number of heads fits exactly any more. The error falls to the noise and stays there:
# heads beyond the true number only fit noise. The smallest number whose error is within one
# standard error of the best is taken.
noise = 0.1 * soft.label_std_
noisy = y + noise * np.random.default_rng(0).standard_normal(y.shape)
learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X[:5000], noisy[:5000])
HeadCountDisplay.from_estimator(learner)
plt.show()

# %%
# The held-out errors by number of heads, in numbers. They are relative to the power of the
# labels, of which the noise is about 0.01:
for count, error in learner.stages_["heads"].errors_by_count.items():
    print(f"{count} heads: {error:.4f}")
