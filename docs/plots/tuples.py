"""Stage 5: what pairs of points in the sculpted hull explain of the labels."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.layer import AttentionLayer

D = 8
sampler = BooleanAttentionSampler(2, 3, D, attention_scale=2.0, random_state=1)
X, y = sampler.sample(20_000, as_tokens=True)
learner = MultiHeadAttentionLearner(
    n_heads=2, fit_intercept=False, span="sculpt", stage_samples=20_000, random_state=0
).fit(X, y)
span = learner.stages_["span"]
direction, origin = span.basis[0], span.origin

points = np.linspace(-4, 4, 61)
few, labels = X[:150], y[:150].reshape(-1, D)
layer = AttentionLayer(origin + points[:, None, None] * direction, np.zeros((len(points), D, D)))
patterns = layer.attention_weights(few)
pooled = np.einsum("nhab,nbd->hnad", patterns, few).reshape(len(points), -1, D)
left = np.full((len(points), len(points)), np.nan)
for one in range(len(points)):
    for other in range(one):
        design = np.concatenate([pooled[one], pooled[other]], axis=1)
        residual = labels - design @ np.linalg.lstsq(design, labels, rcond=None)[0]
        left[one, other] = np.sum(residual**2) / np.sum(labels**2)

figure, ax = plt.subplots(figsize=(5.4, 4.4), layout="constrained")
image = ax.pcolormesh(points, points, np.log10(left), cmap="viridis_r", shading="nearest")
truth = np.sort([np.vdot(theta - origin, direction) for theta in sampler.layer_.attention])
ax.plot(*truth, "o", color="tab:orange", markersize=8, label="true heads")
ax.set(xlabel="place of one head in the hull", ylabel="place of the other", aspect="equal")
ax.set_title("Relative squared residual of the regression", fontsize="medium")
ax.legend(frameon=False, loc="lower right")
figure.colorbar(image, label="log10 of the residual")
