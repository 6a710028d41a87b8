"""
Ordinary data in a pipeline
===========================

A table of ten measurements on 442 people and a number to predict: no tokens, no heads, no truth. Every
column becomes a token, a position tells which column it is, and the learner is one step of a
scikit-learn pipeline like any other. The data is scikit-learn's ``load_diabetes``.
"""

# %%
# Columns are tokens
# ------------------
# A token of one number says nothing of where it came from, and attention treats tokens as a set. So
# a person is the same whichever way their ten numbers are shuffled, and little can be predicted.
# ``TokenPositionEncoder`` appends to each number which column it is in.
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mhal import MultiHeadAttentionLearner, TokenPositionEncoder

data = load_diabetes()
X, y = data.data, data.target
folds = KFold(5, shuffle=True, random_state=0)
# On ordinary data the best attention need not be determined to ten digits, which is fine here.
warnings.simplefilter("ignore", ConvergenceWarning)

learner = MultiHeadAttentionLearner(1, n_tokens=X.shape[1], readout="mean", alpha=0.01, random_state=0)
blind = make_pipeline(StandardScaler(), learner)
seeing = make_pipeline(StandardScaler(), TokenPositionEncoder(), learner)
ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 3, 11)))
models = {"without positions": blind, "with positions": seeing, "ridge regression": ridge}
scores = {name: cross_val_score(model, X, y, cv=folds) for name, model in models.items()}
for name, score in scores.items():
    print(f"{name:<18} R^2 {score.mean():.3f} +- {score.std() / np.sqrt(len(score)):.3f}")

# %%
# Choosing the settings
# ---------------------
# Nothing here is exact, so nobody can count the heads: cross-validation chooses their number, the penalty
# ``alpha``, which does most of the work with so few rows, and how many random starts stage 5 may
# take. A search over steps of a pipeline, nothing special.
grid = {
    "multiheadattentionlearner__n_heads": [1, 2],
    "multiheadattentionlearner__alpha": [0.01, 0.03, 0.1],
    "multiheadattentionlearner__heads_starts": [2, 4],
}
search = GridSearchCV(seeing, grid, cv=folds, error_score="raise").fit(X, y)
print({name.split("__")[1]: value for name, value in search.best_params_.items()})
print(f"best R^2 {search.best_score_:.3f}, ridge regression {scores['ridge regression'].mean():.3f}")

# %%
# What it looks at
# ----------------
# On the left the scores of the search. On the right the attention weights of the best pipeline, averaged
# over people: how much of each column a head passes on.
results = search.cv_results_
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for n_heads in grid["multiheadattentionlearner__n_heads"]:
    chosen = results["param_multiheadattentionlearner__n_heads"] == n_heads
    alphas = np.asarray(results["param_multiheadattentionlearner__alpha"][chosen], dtype=float)
    means = results["mean_test_score"][chosen]
    best = [means[alphas == alpha].max() for alpha in np.unique(alphas)]
    left.plot(np.unique(alphas), best, "o-", label=f"{n_heads} head{'s' if n_heads > 1 else ''}")
left.axhline(scores["ridge regression"].mean(), color="grey", linestyle="--", label="ridge regression")
left.axhline(scores["without positions"].mean(), color="grey", linestyle=":", label="without positions")
left.set(xscale="log", xlabel="alpha", ylabel="R², mean of five folds", title="Cross-validation")
left.legend(loc="center left")

best = search.best_estimator_
tokens = best[:-1].transform(X)
weights = best[-1].attention_weights(tokens).mean(axis=(0, 2))
height = 0.8 / len(weights)
for head, weight in enumerate(weights):
    right.barh(np.arange(len(weight)) + head * height, weight, height, label=f"head {head}")
right.axvline(1 / X.shape[1], color="grey", linestyle=":", label="equal weights")
right.set_yticks(np.arange(X.shape[1]) + 0.5 * height * (len(weights) - 1), data.feature_names)
right.invert_yaxis()
right.set(xlabel="attention weight, mean over people and queries", title="Best pipeline")
right.legend()
plt.show()

# %%
# Most of the attention goes to the body mass index, the blood pressure and ``s5``, the logarithm of the
# triglycerides; these are measurements that rise with the disease. A head's weights say where it looks, not
# in which direction it moves the prediction: that is in its projection matrix.
#
# One attention layer is no better than ridge regression on this table, and 442 rows would hardly
# show it if it were. What this page shows is that the learner can be put to the question like any
# other regressor.
