"""Radii of Newton and Kantorovich: whether the learned layer is the only solution nearby.

With ``sigma`` the smallest singular value of the derivative J_0 of the equations F at the learned
parameters, K a Lipschitz constant of the derivative and ``h = |F| K / sigma^2 <= 1/2``, Newton-Kantorovich
on ``G(x) = J_0^+ F(x)`` gives two radii::

    solution radius    (1 - sqrt(1 - 2 h)) sigma / K     contains a solution of G
    uniqueness radius  (1 + sqrt(1 - 2 h)) sigma / K     contains no other

and a layer that satisfies the training equations exactly is a solution of G. The constants are derived
in the documentation, "Reading the certificate".
"""

from __future__ import annotations

import numpy as np

from .._forward import Array
from .._problem import Problem
from ._spectrum import Spectrum

# The projections' norm, on which the Lipschitz constant depends, is taken this share of all larger, so
# that the constant holds in a ball of this relative radius; no radius that is proved may exceed it.
_BALL = 1e-3


def radii_of(
    problem: Problem, attention: Array, projection: Array, spectrum: Spectrum
) -> tuple[float, float]:
    """Return the relative solution and uniqueness radii."""
    sigma, lipschitz, scale = _constants(problem, attention, projection, spectrum)
    misfit = np.sqrt(problem.evaluate(attention).error * problem.label_power)
    rounding = np.finfo(np.float64).eps * np.sqrt(problem.label_power) * np.sqrt(len(projection))
    h = (misfit + rounding) * lipschitz / sigma**2
    # Tokens that never differ give a constant of zero: then nothing is said of the attention.
    if h > 0.5 or not np.isfinite(h) or not lipschitz > 0.0:
        return np.inf, 0.0
    root = np.sqrt(1.0 - 2.0 * h)
    ratio = sigma / lipschitz / scale
    # 1 - sqrt(1 - 2 h) loses all digits for small h; this is the same number.
    solution = float(2.0 * h / (1.0 + root) * ratio)
    return (solution, float(min((1.0 + root) * ratio, _BALL))) if solution < _BALL else (np.inf, 0.0)


def _constants(
    problem: Problem, attention: Array, projection: Array, spectrum: Spectrum
) -> tuple[float, float, float]:
    """Return bounds on the smallest singular value and the Lipschitz constant, and the parameters' norm."""
    rows = problem.rows
    coupling = spectrum.coupling
    if not np.isfinite(coupling):
        coupling = np.sqrt(_attention_norm(problem, attention, projection) / spectrum.gram_smallest)
    # |inverse of the joint matrix| <= |S^-1| (1 + |G^-1 B^T|^2) + |G^-1|: block elimination.
    sigma = ((1.0 + coupling**2) / spectrum.smallest + 1.0 / spectrum.gram_smallest) ** -0.5
    spread = np.linalg.norm(rows.tokens - rows.tokens.mean(axis=1, keepdims=True), axis=2).max(axis=1)
    queries = np.linalg.norm(rows.queries, axis=1).reshape(rows.n_samples, -1).max(axis=1)
    norms = np.linalg.norm(projection.reshape(-1, rows.n_features, projection.shape[1]), 2, axis=(1, 2))
    scale = float(np.sqrt(np.vdot(attention, attention) + np.vdot(projection, projection)))
    largest_norm = float(norms.max()) + _BALL * scale
    weights = 1.0 if rows.root_weights is None else rows.root_weights
    second = weights * (2.0 * spread**3 * queries**2 * largest_norm + spread**2 * queries)
    return sigma, float(np.sqrt(rows.rows_per_sample) * np.linalg.norm(second)), scale


def _attention_norm(problem: Problem, attention: Array, projection: Array) -> float:
    """Return a bound on the largest eigenvalue of ``J^T J = sum q q^T (x) C C^T``.

    No eigenvalue exceeds the trace, ``sum |q|^2 |C|^2`` over rows, with ``C_i = Cov_{p_i}(x) W_i``.
    """
    rows = problem.rows
    patterns = rows.patterns(attention)
    n_heads = attention.shape[1] // rows.n_features
    # |Cov_p(x)| is at most the p-weighted mean square distance from the sample's mean token.
    distances = np.square(rows.tokens - rows.tokens.mean(axis=1, keepdims=True)).sum(axis=2)
    scatter = (patterns @ distances[:, :, None])[:, :, 0].reshape(rows.n_samples, rows.n_queries, n_heads)
    powers = np.square(projection.reshape(n_heads, -1)).sum(axis=1)
    squares = (np.square(scatter) * powers).sum(axis=2)
    lengths = np.square(rows.queries).sum(axis=1).reshape(rows.n_samples, rows.n_queries)
    weights = 1.0 if rows.root_weights is None else np.square(rows.root_weights)[:, None]
    return float((lengths * squares * weights).sum())
