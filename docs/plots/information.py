"""Certificate: the spectrum of the information on the attention, with and without free directions."""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._examples import make_examples
from sklearn_mhal._forward import stack_attention
from sklearn_mhal._information import information

# A direction that is free need not be left by the solver, and then it does not converge.
warnings.simplefilter("ignore", ConvergenceWarning)
generic = BooleanAttentionSampler(3, 4, 5, random_state=0).layer_
no_projection, equal = generic.projection.copy(), generic.attention.copy()
no_projection[2] = 0.0
equal[2] = equal[1]
layers = {
    "generic": generic,
    "one head without projection": AttentionLayer(generic.attention, no_projection),
    "two equal heads": AttentionLayer(equal, generic.projection),
}

figure, ax = plt.subplots(figsize=(5.8, 3.8), layout="constrained")
for (name, layer), marker in zip(layers.items(), "os^", strict=True):
    sampler = BooleanAttentionSampler(n_tokens=4, layer=layer, random_state=0)
    X, y = sampler.sample(300, as_tokens=True)
    learner = MultiHeadAttentionLearner(n_heads=3, fit_intercept=False, max_iter=50, random_state=0).fit(X, y)
    problem = make_examples(X, y, random_state=0).problem()
    attention = stack_attention(learner.attention_matrices_, None)
    projection = problem.evaluate(attention).regression.projection
    values = np.linalg.eigvalsh(information(problem, attention, projection).schur())[::-1]
    values = np.maximum(values / values[0], 1e-18)
    verdict = learner.certificate_.verdict.split(":")[0]
    ax.semilogy(np.arange(1, len(values) + 1), values, marker, markersize=3, label=f"{name}: {verdict}")
ax.set(xlabel="index", ylabel="eigenvalue / largest", ylim=(1e-19, 30))
ax.grid(axis="y", color="0.92")
ax.legend(frameon=False, loc="center left")
