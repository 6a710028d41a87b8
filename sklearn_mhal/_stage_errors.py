"""What each stage estimated, measured against a layer that is known.

The learner never sees the truth; the demo and the pictures do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._forward import Array
from .layer import AttentionLayer
from .metrics import head_recovery_error


@dataclass(frozen=True)
class StageError:
    """How far a stage's estimate is from the truth."""

    compared: str
    """What was compared with the truth."""
    error: float
    """Relative to the truth, 0 for a perfect estimate; infinite for another number of heads."""
    is_angle: bool = False
    """Whether the estimate is a span, and `error` the sine of the angle that misses it most."""

    @property
    def cosine(self) -> float:
        """Cosine of that angle: 1 for a perfect span."""
        return float(np.sqrt(max(0.0, 1.0 - self.error**2)))


def stage_errors(stages: Mapping[str, Any], true_layer: AttentionLayer) -> dict[str, StageError]:
    """Compare the stages of a fit with the layer that its examples came from.

    Parameters
    ----------
    stages : mapping of str to stage result
        `stages_` of a fitted learner.
    true_layer : AttentionLayer

    Returns
    -------
    dict of str to StageError
        In the order of `stages`; without the stages that estimated nothing comparable, such as
        a body that no row was certified for, or differences of heads where there is one head.

    Raises
    ------
    ValueError
        If the layer has another number of features or outputs than the data of the fit.
    """
    expected, found = stages["crude_sum"].total.shape, true_layer.projection.shape[1:]
    if expected != found:
        raise ValueError(
            f"true_layer has (n_features, n_outputs) = {found}, the learner was fitted on {expected}."
        )
    errors = {name: stage_error(name, result, true_layer) for name, result in stages.items()}
    return {name: error for name, error in errors.items() if error is not None}


def stage_error(name: str, result: Any, true_layer: AttentionLayer) -> StageError | None:
    """Compare one stage's result with the truth; None if it estimated nothing comparable."""
    if name in ("crude_sum", "refine_sum"):
        truth = true_layer.projection.sum(axis=0)
        error = np.linalg.norm(result.total - truth) / (np.linalg.norm(truth) or 1.0)
        return StageError("sum of the projections", float(error))
    if name == "sculpt":
        return _sculpted_error(result, true_layer)
    if name == "span":
        return _span_error(result, true_layer)
    if name in ("heads", "polish"):
        return StageError("every head", head_recovery_error(true_layer, result.layer))
    return None


def _sculpted_error(sculpture: Any, true_layer: AttentionLayer) -> StageError | None:
    """Compare the longest axes of the body with the differences of the true heads."""
    n_axes = true_layer.n_heads - 1
    body = sculpture.body
    if body is None or sculpture.n_interior == 0 or n_axes == 0:
        return None
    d = true_layer.n_features
    axes = body.eigenvectors[:, :n_axes].T.reshape(n_axes, -1, d)
    stacked = axes.transpose(1, 0, 2).reshape(-1, n_axes * d)
    directions, _ = body.units.attention_out(stacked)
    return _angle("differences of attention matrices", directions, _differences(true_layer))


def _span_error(span: Any, true_layer: AttentionLayer) -> StageError | None:
    affine = any(frame.affine for frame in span.frames if frame.source == span.source)
    if affine:
        return _angle("differences of attention matrices", span.basis, _differences(true_layer))
    return _angle("attention matrices", span.basis, true_layer.attention)


def _differences(layer: AttentionLayer) -> Array:
    first, second = np.triu_indices(layer.n_heads, 1)
    return np.asarray(layer.attention[first] - layer.attention[second])


def _angle(compared: str, directions: Array, targets: Array) -> StageError | None:
    """Return the sine of the largest angle between a target and the span of the directions."""
    flat = targets.reshape(len(targets), int(np.prod(targets.shape[1:])))
    lengths = np.linalg.norm(flat, axis=1)
    flat, lengths = flat[lengths > 0], lengths[lengths > 0]
    if not len(directions) or not len(flat):
        return None
    basis = np.linalg.qr(directions.reshape(len(directions), -1).T)[0]
    distances = np.linalg.norm(flat - (flat @ basis) @ basis.T, axis=1) / lengths
    plural = "" if len(basis.T) == 1 else "s"
    compared = f"{compared}, {len(basis.T)} direction{plural}"
    return StageError(compared, float(distances.max()), is_angle=True)
