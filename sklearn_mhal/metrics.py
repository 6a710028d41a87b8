"""Matching of heads and the recovery error of a learned layer."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from ._forward import Array
from .layer import AttentionLayer


def _relative_errors(true: Array, learned: Array) -> Array:
    """Return the error of every learned array against every true one, ``[true, learned]``.

    Frobenius norms relative to the true one, absolute where that one is zero.
    """
    errors = np.empty((len(true), len(learned)))
    for index, target in enumerate(true):
        difference = (learned - target).reshape(len(learned), -1)
        errors[index] = np.linalg.norm(difference, axis=1)
        scale = np.linalg.norm(target)
        if scale > 0:
            errors[index] /= scale
    return errors


def _pair_errors(true_layer: AttentionLayer, learned_layer: AttentionLayer, include_affine: bool) -> Array:
    """Return the largest error of each pair of a true and a learned head."""
    names = ("attention", "projection", "key_bias") if include_affine else ("attention", "projection")
    parts = [_relative_errors(getattr(true_layer, name), getattr(learned_layer, name)) for name in names]
    largest: Array = np.max(parts, axis=0)
    return largest


def _same_shapes(true_layer: AttentionLayer, learned_layer: AttentionLayer) -> bool:
    return (
        true_layer.attention.shape == learned_layer.attention.shape
        and true_layer.projection.shape == learned_layer.projection.shape
    )


def _best_permutation(errors: Array) -> Array:
    # A saturating cost: a head that is far off anyway must not buy itself a nearer partner
    # by taking the one that another head recovered.
    return np.asarray(linear_sum_assignment(errors / (1.0 + errors))[1])


def match_heads(
    true_layer: AttentionLayer, learned_layer: AttentionLayer, *, include_affine: bool = False
) -> Array:
    """Find the learned head that belongs to each true head.

    A pair of heads costs ``e / (1 + e)``, with ``e`` the larger of the relative Frobenius
    errors of its two attention matrices and of its two projection matrices; the matching
    with the smallest total cost wins. The cost saturates, so that a head which is not
    recovered at all does not spoil the match of the others.

    Parameters
    ----------
    true_layer, learned_layer : AttentionLayer
        Layers of the same shapes.
    include_affine : bool, default=False
        Whether the key biases take part in ``e``; only needed where heads differ in nothing else.

    Returns
    -------
    ndarray of shape (n_heads,)
        ``learned_layer.attention[permutation[i]]`` belongs to ``true_layer.attention[i]``.

    Raises
    ------
    ValueError
        If the layers differ in shape.

    See Also
    --------
    sklearn_mhal.head_recovery_error : The largest error after this matching.

    Examples
    --------
    >>> from sklearn_mhal import AttentionLayer, BooleanAttentionSampler
    >>> from sklearn_mhal.metrics import match_heads
    >>> layer = BooleanAttentionSampler(n_heads=3, random_state=0).layer_
    >>> shuffled = AttentionLayer(layer.attention[[2, 0, 1]], layer.projection[[2, 0, 1]])
    >>> match_heads(layer, shuffled)
    array([1, 2, 0])
    """
    if not _same_shapes(true_layer, learned_layer):
        raise ValueError(f"The layers must have the same shapes, got {true_layer!r} and {learned_layer!r}.")
    return _best_permutation(_pair_errors(true_layer, learned_layer, include_affine))


def head_recovery_error(
    true_layer: AttentionLayer, learned_layer: AttentionLayer, *, include_affine: bool = False
) -> float:
    """Measure how well a learned layer's heads match the true ones.

    The largest of the relative Frobenius errors ``|Theta_i - Theta_i'| / |Theta_i|`` and
    ``|W_i - W_i'| / |W_i|`` over all heads, after matching the heads with
    :func:`~sklearn_mhal.metrics.match_heads`.
    A true matrix that is zero has no relative error; its error is taken absolutely.

    Parameters
    ----------
    true_layer, learned_layer : AttentionLayer
    include_affine : bool, default=False
        Whether the relative errors of each head's key bias and of the intercept count too,
        again absolute where the true vector is zero.

    Returns
    -------
    float
        Non-negative; infinite if the layers differ in the number of heads or in another shape.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal import AttentionLayer, head_recovery_error
    >>> layer = AttentionLayer(np.ones((1, 2, 2)), np.ones((1, 2, 2)))
    >>> nearby = AttentionLayer(1.01 * layer.attention, layer.projection)
    >>> print(f"{head_recovery_error(layer, nearby):.3f}")
    0.010
    """
    if not _same_shapes(true_layer, learned_layer):
        return float("inf")
    errors = _pair_errors(true_layer, learned_layer, include_affine)
    permutation = _best_permutation(errors)
    largest = errors[np.arange(len(errors)), permutation].max(initial=0.0)
    if include_affine:
        intercepts = true_layer.intercept[None], learned_layer.intercept[None]
        largest = max(largest, _relative_errors(*intercepts)[0, 0])
    return float(largest)
