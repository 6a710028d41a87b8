"""Sums over all samples, chunk by chunk.

Everything that must see all the data is a sum over rows. A chunk's part is a plain function of
the chunk, so memory stays bounded and the parts can be computed anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from scipy.linalg import cho_solve

from ._examples import Examples
from ._forward import Array
from ._problem import Problem, factorise

# A part shorter than this many chunks is not worth handing to another worker.
_CHUNKS_PER_TASK = 4


def sum_over_samples(
    part: Callable[..., tuple[Array | float, ...]],
    examples: Examples,
    *arguments: Any,
    n_heads: int,
    n_jobs: int | None = None,
) -> tuple[Any, ...]:
    """Return the sum of ``part(chunk, *arguments)`` over chunks of all samples.

    The parts are added in the order of the chunks, so the sum does not depend on `n_jobs`.
    """
    chunks = list(examples.chunks(n_heads))
    if len(chunks) <= _CHUNKS_PER_TASK:
        parts = [part(chunk, *arguments) for chunk in chunks]
    else:
        parts = Parallel(n_jobs=n_jobs, prefer="threads")(
            delayed(part)(chunk, *arguments) for chunk in chunks
        )
    total = list(parts[0])
    for other in parts[1:]:
        total = [mine + theirs for mine, theirs in zip(total, other, strict=True)]
    return tuple(total)


def _normal_part(chunk: Examples, attention: Array) -> tuple[Array, Array]:
    problem = chunk.problem()
    rows = problem.rows
    design = rows.pooled(rows.patterns(attention))
    if problem.fit_intercept:
        ones = np.ones(len(design)) if rows.row_scale is None else rows.row_scale
        design = np.concatenate([design, ones[:, None]], axis=1)
    return design.T @ design, design.T @ problem.labels


def _gradient_part(
    chunk: Examples, attention: Array, projection: Array, intercept: Array
) -> tuple[Array, float, float]:
    problem = chunk.problem()
    patterns = problem.rows.patterns(attention)
    residual = _residual(problem, problem.rows.pooled(patterns), projection, intercept)
    values = problem.rows.values(projection)
    gradient = problem.rows.backward_product(residual, patterns, values)
    return gradient, float(np.vdot(residual, residual)), float(np.vdot(problem.labels, problem.labels))


def _residual_part(
    chunk: Examples, attention: Array, projection: Array, intercept: Array
) -> tuple[float, float]:
    problem = chunk.problem()
    pooled = problem.rows.pooled(problem.rows.patterns(attention))
    residual = _residual(problem, pooled, projection, intercept)
    return float(np.vdot(residual, residual)), float(np.vdot(problem.labels, problem.labels))


def _residual(problem: Problem, pooled: Array, projection: Array, intercept: Array) -> Array:
    residual = problem.labels - pooled @ projection
    if problem.fit_intercept:
        scale = problem.rows.row_scale
        residual -= intercept if scale is None else np.outer(scale, intercept)
    return residual


def residual_power(
    examples: Examples, attention: Array, projection: Array, intercept: Array, *, n_jobs: int | None
) -> float:
    """Return the squared residual of a layer on all samples relative to the label power."""
    n_heads = attention.shape[1] // examples.n_features
    residual, power = sum_over_samples(
        _residual_part, examples, attention, projection, intercept, n_heads=n_heads, n_jobs=n_jobs
    )
    return float(residual) / max(float(power), 1e-300)


def regress_all(
    examples: Examples, attention: Array, *, ridge: float, n_jobs: int | None
) -> tuple[Array, Array]:
    """Return projections and intercept fitted to all samples for given attention."""
    n_heads = attention.shape[1] // examples.n_features
    gram, right = sum_over_samples(_normal_part, examples, attention, n_heads=n_heads, n_jobs=n_jobs)
    n_columns = attention.shape[1]
    np.einsum("ii->i", gram)[:n_columns] += ridge
    n_rows = examples.n_samples * examples.labels.shape[1]
    factor = (factorise(gram.copy(), n_rows=n_rows), True)
    solution = cho_solve(factor, right, check_finite=False)
    solution += cho_solve(factor, right - gram @ solution, check_finite=False)
    if examples.fit_intercept:
        return solution[:n_columns], solution[-1]
    return solution, np.zeros(examples.n_outputs)


def gradient_all(
    examples: Examples, attention: Array, projection: Array, intercept: Array, *, n_jobs: int | None
) -> tuple[Array, float]:
    """Return the gradient of half the squared residual, negated, and the squared residual."""
    n_heads = attention.shape[1] // examples.n_features
    gradient, residual, _ = sum_over_samples(
        _gradient_part, examples, attention, projection, intercept, n_heads=n_heads, n_jobs=n_jobs
    )
    return gradient, float(residual)
