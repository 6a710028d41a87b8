"""Uncertainty: errors of many noisy fits in units of their standard errors."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.metrics import match_heads

ratios = []
for seed in range(12):
    noise = 0.1 * BooleanAttentionSampler(2, 4, 6, random_state=seed).label_std_
    sampler = BooleanAttentionSampler(2, 4, 6, noise_std=noise, random_state=seed)
    learner = MultiHeadAttentionLearner(n_heads=2, n_tokens=4, fit_intercept=False, random_state=0)
    learner.fit(*sampler.sample(2000))
    order = match_heads(sampler.layer_, learner.layer_)
    errors = learner.attention_matrices_[order] - sampler.layer_.attention
    ratios.append(errors / learner.attention_std_errors_[order])
ratios = np.concatenate(ratios).ravel()

figure, ax = plt.subplots(figsize=(5.8, 3.4), layout="constrained")
grid = np.linspace(-4, 4, 200)
ax.hist(ratios, bins=np.linspace(-4, 4, 33), density=True, color="tab:blue", alpha=0.5)
ax.plot(grid, np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi), color="0.3", label="standard normal")
inside = np.mean(np.abs(ratios) <= 1.96)
ax.set(xlabel="error in standard errors", ylabel="density")
ax.set_title(f"{inside:.1%} of {len(ratios)} entries within 1.96 standard errors", fontsize="medium")
ax.legend(frameon=False)
