"""With noise: the standard error of every parameter.

For independent label noise of standard deviation ``tau`` the least-squares estimate has covariance
``tau^2 I^-1`` up to higher order, with I the information matrix, and meets the Cramer-Rao bound for
Gaussian noise. ``tau`` is estimated from the residual and its degrees of freedom, I from a part of the
samples. The inverse of the mean over a part is too large on average, by a share that falls with its size n
like 1/n: variances ``v(n) = v / (1 - c / n)``, as of a Wishart matrix. So the part is taken in two halves,
and what ``1 / v`` gains from one to both is carried on to all samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array
from .._information import Information, information, inverse_roots, n_products
from .._memory import samples_per_chunk
from .._units import Units
from ._result import StageResult, timed
from .certify import EXACT_RESIDUAL

# Samples, in multiples of the information limit, that stand for all: as many as the multiplications
# allow, half a second's, between these. From 32 the errors came out within 3 % (measured, d = 8 to 32;
# 10 % at a scale of 8), from 128 within 1 %.
_PART, _LEAST_MULTIPLE = 256, 32
_LEAST_PART = 1024
_MULTIPLICATIONS = 1e10
# A matrix of this many attention parameters squared is formed and factorised (200 MB).
_MOST = 5000


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
    n_part = _n_part(examples, attention, n_heads)
    if not locally_identified or n_free <= 0 or examples.n_tokens == 1 or attention.size > _MOST:
        reason = (
            "the layer is too large for its information matrix"
            if attention.size > _MOST
            else "some parameter is not determined"
        )
        return _result(noise_std, None, n_part, f"noise {noise_std:.2g}; no standard errors: {reason}")
    errors = [noise * error for error in _unit_errors(examples, attention, n_part)]
    return _result(
        noise_std,
        errors,
        n_part,
        f"noise of standard deviation {noise_std:.2g}; information from {n_part} samples",
    )


def _n_part(examples: Examples, attention: Array, n_heads: int) -> int:
    """Return how many samples give the information."""
    limit = examples.information_limit(n_heads)
    per_row = n_products(len(attention), attention.shape[1], examples.n_outputs)
    affordable = int(_MULTIPLICATIONS / (per_row * examples.labels.shape[1]))
    n_part = int(np.clip(affordable, _LEAST_MULTIPLE * limit, max(_PART * limit, _LEAST_PART)))
    return min(examples.n_samples, n_part)


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


def _unit_errors(examples: Examples, attention: Array, n_part: int) -> list[Array]:
    """Return standard errors for noise of unit variance, internally, in the units of the data."""

    def informed(samples: Examples) -> Information:
        part = samples.problem()
        return information(part, attention, part.evaluate(attention).regression.projection)

    def precisions(info: Information, n_samples: int) -> list[Array]:
        found = _variances(examples.units, info, attention.shape[1])
        # Biases and intercepts that are not fitted have none.
        return [1.0 / np.maximum(part * n_samples, 1e-300) for part in found]

    half = n_part // 2
    info = informed(examples.first(half))
    few = precisions(info, half)
    many = precisions(info + informed(examples.between(half, n_part)), n_part)
    # A part's own information is no larger than the whole's, so that the result cannot be negative.
    reach = 1.0 - n_part / examples.n_samples
    all_samples = [both + reach * (both - one) for one, both in zip(few, many, strict=True)]
    return [1.0 / np.sqrt(examples.total_weight * part) for part in all_samples]


def _variances(units: Units, info: Information, n_columns: int) -> list[Array]:
    """Return variances for noise of unit variance, internally, in the units of the data.

    The change of units is linear and mixes parameters, so it is made of every row of the roots.
    """
    attention, alone, carried = inverse_roots(info)
    width = info.query_width
    n_heads = n_columns // units.width
    squares: list[Array] = [0.0, 0.0]  # type: ignore[list-item]
    step = samples_per_chunk(32 * n_heads * units.n_features**2, len(attention))
    for start in range(0, len(attention), step):
        rows = attention[start : start + step].reshape(-1, width, n_columns)
        # Every row's heads side by side, as if they were one layer's.
        for index, part in enumerate(units.attention_out(rows.transpose(1, 0, 2).reshape(width, -1))):
            by_head = part.reshape(len(rows), n_heads, *part.shape[1:])
            squares[index] = squares[index] + np.einsum("r...,r...->...", by_head, by_head)

    def projected(changes: Array) -> tuple[Array, Array]:
        # Rows take the place of outputs.
        _, heads, _, offset = units.change(np.zeros((width, n_columns)), changes.T)
        return np.einsum("mdr,mdr->md", heads, heads), np.einsum("r,r->", offset, offset)

    own_heads, own_offset = projected(alone)
    added = [projected(carried[:, :, output]) for output in range(carried.shape[2])]
    heads = own_heads[:, :, None] + np.stack([part for part, _ in added], axis=2)
    offset = own_offset + np.array([part for _, part in added])
    return [squares[0], heads, squares[1], offset]
