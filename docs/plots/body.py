"""Stage 2: a plane through the sculpted body, soft and hard attention."""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner

figure, axes = plt.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained")
for ax, scale in zip(axes, (1.0, 4.0), strict=True):
    sampler = BooleanAttentionSampler(2, 4, 8, attention_scale=scale, random_state=0)
    X, y = sampler.sample(20_000)
    learner = MultiHeadAttentionLearner(
        n_heads=2, n_tokens=4, fit_intercept=False, stage_samples=20_000, random_state=0
    ).fit(X, y)
    sculpture = learner.stages_["sculpt"]
    body = sculpture.body

    # The plane holds both heads (their difference is the abscissa) and the body's centre.
    first, second = (body.units.attention_in(theta[None]).ravel() for theta in sampler.layer_.attention)
    middle = 0.5 * (first + second)
    along = (first - second) / np.linalg.norm(first - second)
    across = body.anchor() - middle
    across -= (across @ along) * along
    across /= np.linalg.norm(across)
    x, y_axis = np.linspace(-2.2, 2.2, 241) * scale, np.linspace(-1.6, 1.6, 181) * scale
    points = middle + x[None, :, None] * along + y_axis[:, None, None] * across
    inside = body.violation(points)
    ax.contourf(x, y_axis, inside, levels=[0.0, 1.0], colors=["tab:blue"], alpha=0.25)
    ax.contour(x, y_axis, inside, levels=[1.0], colors=["tab:blue"], linewidths=1)
    heads = 0.5 * np.linalg.norm(first - second)
    ax.axhline(0.0, color="0.6", linewidth=1, linestyle=":")
    ax.plot([heads, -heads], [0, 0], "o", color="tab:orange", label="true heads")
    place = (body.anchor() - middle) @ np.stack([along, across]).T
    ax.plot(*place, "x", color="tab:blue", label="the body's point")
    ax.set(xlabel="along the affine hull", aspect="equal")
    ax.set_title(
        f"scale {scale:g}: {sculpture.n_interior} interior, {sculpture.n_vertex} vertex rows",
        fontsize="medium",
    )
axes[0].set_ylabel("across")
axes[0].legend(frameon=False, loc="lower left")
