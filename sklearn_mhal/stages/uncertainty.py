"""With noise: the standard error of every parameter.

For independent label noise of standard deviation ``tau`` the least-squares estimate has covariance
``tau^2 I^-1`` up to higher order, with I the information matrix, and meets the Cramer-Rao bound for
Gaussian noise. ``tau`` is estimated from the residual and its degrees of freedom, I from enough
samples that its inverse is known to about a per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from .._examples import Examples
from .._forward import Array, unstack_attention
from .._information import Information, information, inverse_diagonals
from .._problem import factorise
from .._units import Units
from ._result import StageResult, timed
from .certify import EXACT_RESIDUAL

_PART = 128
_LEAST_PART = 1024
# A matrix of this many attention parameters squared is formed and factorised (200 MB).
_MOST = 5000
# Other units than white ones mix the parameters, which takes the joint covariance.
_MOST_JOINT = 4000


@dataclass(frozen=True, kw_only=True, eq=False)
class Uncertainty(StageResult):
    """Standard errors in the units of the data; None where the layer is too large for them."""

    noise_std: float
    """Standard deviation of the label noise."""
    attention: Array | None
    """(m, d, d)."""
    projection: Array | None
    """(m, d, d_out)."""
    key_bias: Array | None
    """(m, d)."""
    intercept: Array | None
    """(d_out,)."""


@timed
def estimate_uncertainty(
    examples: Examples, attention: Array, *, residual: float, locally_identified: bool
) -> Uncertainty:
    """Estimate noise and standard errors at a least-squares solution.

    Parameters
    ----------
    examples : Examples
    attention : ndarray of shape (q, m * d)
        Stacked, internal units.
    residual : float
        Squared residual on all samples relative to the label power.
    locally_identified : bool
        Whether the information matrix can be inverted.

    Returns
    -------
    Uncertainty
    """
    d, n_outputs = examples.n_features, examples.n_outputs
    n_heads = attention.shape[1] // d
    shapes = ((n_heads, d, d), (n_heads, d, n_outputs), (n_heads, d), (n_outputs,))
    n_equations = examples.total_weight * examples.equations_per_sample
    n_free = n_equations - examples.n_unknowns(n_heads)
    # Labels have unit mean square in internal units.
    noise = float(np.sqrt(residual * n_equations / max(n_free, 1.0)))
    noise_std = noise * examples.units.label_scale
    if residual <= EXACT_RESIDUAL:
        zeros = [np.zeros(shape) for shape in shapes]
        message = "no noise: the standard errors are zero"
        return _result(noise_std, zeros, examples.n_samples, message)
    n_part = min(examples.n_samples, max(_PART * examples.information_limit(n_heads), _LEAST_PART))
    if not locally_identified or n_free <= 0 or examples.n_tokens == 1 or attention.size > _MOST:
        reason = (
            "the layer is too large for its information matrix"
            if attention.size > _MOST
            else "some parameter is not determined"
        )
        return _result(noise_std, None, n_part, f"noise {noise_std:.2g}; no standard errors: {reason}")
    part = examples.first(n_part).problem()
    state = part.evaluate(attention)
    info = information(part, attention, state.regression.projection)
    share = examples.total_weight / part.rows.n_samples
    if examples.units.whitener is None:
        attention_part, projection_part = inverse_diagonals(info)
        errors = _in_place(examples.units, attention_part, projection_part, attention.shape)
    elif len(info.attention) + info.cross.shape[1] * n_outputs <= _MOST_JOINT:
        errors = _mixed(examples.units, info, attention.shape)
    else:
        message = f"noise {noise_std:.2g}; no standard errors: too large for tokens that are not white"
        return _result(noise_std, None, n_part, message)
    factor = noise / np.sqrt(share)
    return _result(
        noise_std,
        [factor * error for error in errors],
        n_part,
        f"noise of standard deviation {noise_std:.2g}; information from {n_part} samples",
    )


def _result(noise_std: float, errors: list[Array] | None, n_samples: int, message: str) -> Uncertainty:
    attention, projection, key_bias, intercept = errors if errors is not None else (None,) * 4
    return Uncertainty(
        noise_std=noise_std,
        attention=attention,
        projection=projection,
        key_bias=key_bias,
        intercept=intercept,
        n_samples=n_samples,
        message=message,
    )


def _in_place(units: Units, attention: Array, projection: Array, shape: tuple[int, ...]) -> list[Array]:
    """Return standard errors where internal units differ from the data's by label scale only."""
    theta, bias = unstack_attention(np.sqrt(attention).reshape(shape), units.n_features)
    projection = np.sqrt(projection) * units.label_scale
    heads = projection[: shape[1]].reshape(len(theta), units.n_features, -1)
    offset = projection[-1] if units.fit_intercept else np.zeros(heads.shape[2])
    return [theta, heads, bias, offset]


def _mixed(units: Units, info: Information, shape: tuple[int, ...]) -> list[Array]:
    """Return standard errors after the linear change of units, from a root of the joint covariance."""
    n_attention, (_, n_columns, n_outputs) = len(info.attention), info.cross.shape
    size = n_attention + n_columns * n_outputs
    joint = np.zeros((size, size))
    joint[:n_attention, :n_attention] = info.attention
    cross = info.cross.reshape(n_attention, -1)
    joint[:n_attention, n_attention:] = cross
    joint[n_attention:, :n_attention] = cross.T
    joint[n_attention:, n_attention:] = np.kron(info.gram, np.eye(n_outputs))
    root = solve_triangular(factorise(joint), np.eye(size), lower=True, check_finite=False)
    squares: list[Array] | None = None
    for row in root:
        # Every row is one change of all parameters; the change of units is linear.
        layer = units.change(
            row[:n_attention].reshape(shape), row[n_attention:].reshape(n_columns, n_outputs)
        )
        parts = [part**2 for part in layer]
        squares = parts if squares is None else [a + b for a, b in zip(squares, parts, strict=True)]
    assert squares is not None
    return [np.sqrt(square) for square in squares]
