"""Stage 6: the residual after every solver step."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler
from sklearn_mhal._examples import make_examples
from sklearn_mhal._solver import steps

figure, ax = plt.subplots(figsize=(5.8, 3.6), layout="constrained")
for m, k, d, scale in ((2, 4, 10, 2), (4, 4, 16, 2), (4, 4, 16, 8), (8, 8, 16, 4)):
    sampler = BooleanAttentionSampler(m, k, d, attention_scale=scale, random_state=0)
    X, y = sampler.sample(600, as_tokens=True)
    generator = np.random.default_rng(0)
    examples = make_examples(X, y, readout="tokens", fit_intercept=False, random_state=generator)
    start = generator.standard_normal((d, m * d)) * 0.3 / d
    errors = [state.error for state, *_ in steps(examples.problem(), start)]
    ax.semilogy(range(1, len(errors) + 1), errors, ".-", label=f"m = {m}, k = {k}, d = {d}, s = {scale}")
ax.set(xlabel="accepted step", ylabel="relative squared residual")
ax.set_title("From random starts, 600 samples, no noise", fontsize="medium")
ax.grid(color="0.92")
ax.legend(frameon=False, fontsize="small")
