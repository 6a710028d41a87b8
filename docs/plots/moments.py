"""Stage 4: singular values of the interaction moments for layers of several heads."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner

figure, ax = plt.subplots(figsize=(5.8, 3.6), layout="constrained")
for n_heads, colour in ((2, "tab:blue"), (4, "tab:orange"), (6, "tab:green")):
    sampler = BooleanAttentionSampler(n_heads, 4, 16, random_state=0)
    learner = MultiHeadAttentionLearner(n_tokens=4, max_heads=9, stage_samples=8000, random_state=0)
    values = learner.fit(*sampler.sample(8000)).stages_["span"].singular_values
    index = np.arange(1, len(values) + 1)
    ax.plot(index, values / values[0], "o-", color=colour, label=f"{n_heads} heads")
    ax.axvline(n_heads + 0.5, color=colour, linestyle=":", linewidth=1)
ax.set(xlabel="index", ylabel="singular value / largest", ylim=(0, None))
ax.set_title("Interaction moments; dotted: the true number of heads", fontsize="medium")
ax.legend(frameon=False)
