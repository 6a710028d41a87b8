"""
Quick start: learn a layer from its examples
============================================

Draw a random attention layer, look only at examples of its inputs and outputs, and get every
head back. Nothing about the layer is given to the learner, not even how many heads it has.
"""

# %%
# Examples
# --------
# A sample is a sequence of four tokens with eight features each, uniform on -1 and 1; its label
# is what the layer outputs for it, one row for every token. In two dimensions, as scikit-learn
# has it, a row of ``X`` is a sequence and a row of ``y`` its outputs.
import matplotlib.pyplot as plt

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error
from sklearn_mhal.plotting import LayerDisplay, PatternDisplay

sampler = BooleanAttentionSampler(n_heads=3, n_tokens=4, n_features=8, random_state=0)
X, y = sampler.sample(2000)
X_test, y_test = sampler.sample(500)
print(X.shape, y.shape)

# %%
# Fit
# ---
# ``n_tokens`` says how the columns of ``X`` divide into tokens. After the fit ``stages_`` prints what
# each stage found and how long it took.
learner = MultiHeadAttentionLearner(n_tokens=4, random_state=0).fit(X, y)
print(learner.stages_)

# %%
# On new samples it predicts the labels to rounding,
print(f"R^2 on new samples: {learner.score(X_test, y_test):.12f}")

# %%
# and it does so for the right reason: every matrix of every head is the true one. A layer's
# examples say nothing about the order of its heads, so they are matched first.
print(f"{learner.n_heads_} heads, recovery error {head_recovery_error(sampler.layer_, learner.layer_):.1e}")

# %%
# The heads
# ---------
# Head ``i`` scores a token for a query with its attention matrix and moves the tokens it
# looks at through its projection matrix. True matrices above, learned ones below:
LayerDisplay.from_estimator(learner, true_layer=sampler.layer_)
plt.show()

# %%
# Where they look
# ---------------
# The attention patterns on samples that were not seen in the fit. Each row of an image is a
# query and sums to 1.
PatternDisplay.from_estimator(learner, X_test[:5])
plt.show()
