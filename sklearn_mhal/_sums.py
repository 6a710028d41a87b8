"""Sums over all samples, block by block.

Everything that must see all the data is a sum over rows. A block's part is a plain function of the
block, so memory stays bounded and the parts can be computed anywhere: in this thread, in others, in
other processes or on a cluster, as joblib is told. Neither the blocks nor the order in which their
parts are added depend on where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend
from scipy.linalg import cho_solve
from threadpoolctl import threadpool_limits

from ._blocks import Block, blocks_of, send_once
from ._examples import Examples
from ._forward import Array
from ._problem import Problem, factorise

Part = Callable[..., tuple[Array | float, ...]]

# Parts that wait to be added take memory too.
_PARTS_AT_A_TIME = 32


def sum_over_samples(
    part: Part,
    examples: Examples,
    *arguments: Any,
    n_heads: int,
    n_jobs: int | None = None,
) -> tuple[Any, ...]:
    """Return the sum of ``part(chunk, *arguments)`` over chunks of all samples.

    The parts are added in the order of the samples, so the sum depends neither on `n_jobs` nor on
    joblib's backend.
    """
    size = examples.chunk_size(n_heads)
    if size >= examples.n_samples:
        # By lot, so that the sum does not depend on the order of the samples either.
        return part(examples, *arguments)
    blocks = examples.cached("blocks", blocks_of)
    try:
        return _sum_of_blocks(part, blocks, size, arguments, n_jobs)
    except FileNotFoundError:
        # Workers that do not see our files are sent their rows.
        if not any(block.in_files() for block in blocks):
            raise
        blocks[:] = [Block(block.examples, by_path=False) for block in blocks]
        return _sum_of_blocks(part, blocks, size, arguments, n_jobs)


def _sum_of_blocks(
    part: Part, blocks: list[Block], size: int, arguments: tuple[Any, ...], n_jobs: int | None
) -> tuple[Any, ...]:
    if len(blocks) == 1:
        return _block_part(part, blocks[0], size, arguments)
    backend, n_active = get_active_backend(prefer="threads")
    send_once(blocks, backend)
    n_workers = backend.effective_n_jobs(n_jobs or n_active or 1)
    at_a_time = max(_PARTS_AT_A_TIME, 4 * n_workers)
    total: tuple[Any, ...] | None = None
    with Parallel(n_jobs=n_jobs, prefer="threads", batch_size=1) as parallel:
        for start in range(0, len(blocks), at_a_time):
            tasks = (
                delayed(_block_part)(part, block, size, arguments)
                for block in blocks[start : start + at_a_time]
            )
            total = _added(parallel(tasks), total)
    assert total is not None
    return total


def _block_part(part: Part, block: Block, size: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    # Neither numpy's flags nor another process's thread pools are those of the fit; see there.
    threads = threadpool_limits(1, user_api="blas") if block.arrived else nullcontext()
    with threads, np.errstate(invalid="ignore"):
        total = _added(part(chunk, *arguments) for chunk in block.chunks(size))
    assert total is not None
    return total


def _added(parts: Iterable[tuple[Any, ...]], total: tuple[Any, ...] | None = None) -> tuple[Any, ...] | None:
    for part in parts:
        total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    return total


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
