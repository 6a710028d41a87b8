"""Stage 6, beyond the paper: all digits, by Levenberg-Marquardt on every parameter.

A few samples first: six times the information limit determines a noise-free layer to
rounding, and one pass over all samples then confirms it. Where the pass finds noise, or the
search for heads has found it before, the solver finishes on all samples: the least-squares
estimate, which meets the Cramer-Rao bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._examples import Examples
from .._forward import Array
from .._progress import SILENT, Progress
from .._solver import OnStep, Solution, solve
from .._sums import residual_power
from ..layer import AttentionLayer
from ._finish import finish
from ._result import StageResult, timed
from ._softness import soft_samples
from .heads import Heads, with_idle

_FEW = 6
_POOL = 8
_LEAST_SAMPLES = 64
# Samples whose curvature stands for all: its relative error is about twice the root of unknowns
# over equations.
_PART = 128
_LEAST_PART = 1024
# The estimate is of the norm of all attention together; a weak head's own error, or its
# projection's, is a modest multiple of it, and the certificate's radius wants a residual near rounding.
_SAFETY = 0.02
# Relative squared residual under which rounding is all that is left on samples not solved.
_ROUNDING = 1e-17


@dataclass(frozen=True, kw_only=True, eq=False)
class Polish(StageResult):
    """The polished layer."""

    layer: AttentionLayer
    """In the units of the data."""
    attention: Array
    """Stacked, internal units."""
    error: float
    """Relative squared residual on all samples."""
    parameter_error: float
    """Estimate of the remaining relative error of the attention, noise aside."""
    converged: bool
    n_iter: int
    """Accepted solver steps."""
    n_products: int
    """Pairs of derivative products."""


@timed
def polish(
    examples: Examples,
    attention: Array,
    *,
    tol: float = 1e-10,
    max_iter: int = 100,
    ridge: float = 0.0,
    attention_ridge: float = 0.0,
    noisy: bool = False,
    n_idle: int = 0,
    n_jobs: int | None = None,
    progress: Progress = SILENT,
) -> Polish:
    """Polish a layer.

    Parameters
    ----------
    examples : Examples
    attention : ndarray of shape (q, m * d)
        Stacked start, internal units.
    tol : float
        Relative accuracy of the attention at which to stop.
    max_iter : int
        Largest number of solver steps, on few and on all samples each.
    ridge, attention_ridge : float
        Penalties, a mean over rows.
    noisy : bool
        Whether the start is known to leave noise or misfit. It then stands for more samples than
        the few, on which it would only drift, so those are left out.
    n_idle : int
        How many heads, the last, are zero and stay so.
    n_jobs : int or None
        Workers for passes over all samples.
    progress : Progress
        Told of up to three tasks, on few, more and all samples, and every solver step in them.

    Returns
    -------
    Polish
    """
    width = examples.n_features
    attention = attention[:, : attention.shape[1] - n_idle * width]
    n_heads = attention.shape[1] // width
    n_few = min(examples.n_samples, max(_FEW * examples.information_limit(n_heads), _LEAST_SAMPLES))

    def run(samples: Examples, start: Array, name: str) -> Solution:
        problem = samples.problem(ridge=ridge, attention_ridge=attention_ridge)
        with progress.task(name, n_steps=max_iter) as steps:
            return solve(
                problem,
                start,
                tol=_SAFETY * tol,
                max_iter=max_iter,
                max_products=200,
                on_step=_told(steps, examples),
            )

    n_iter = n_products = 0
    more = noisy and n_few < examples.n_samples
    if not more:
        chosen = soft_samples(examples.first(_POOL * n_few), attention, n_few)
        solution = run(chosen, attention, "few samples")
        attention, n_iter, n_products = solution.attention, solution.n_steps, solution.n_products
        error = _error(examples, solution, n_jobs)
        noisy = error > _ROUNDING or ridge > 0 or attention_ridge > 0 or not solution.converged
        more = noisy and n_few < examples.n_samples
    if more:
        n_part = max(_PART * examples.information_limit(n_heads), _LEAST_PART)
        solution = run(examples.first(n_part), attention, "more samples")
        error = _error(examples, solution, n_jobs)
        if n_part < examples.n_samples and (error > _ROUNDING or ridge > 0 or attention_ridge > 0):
            n_iter += solution.n_steps
            n_products += solution.n_products
            with progress.task("all samples", n_steps=max_iter) as steps:
                solution = finish(
                    examples,
                    solution.attention,
                    n_part=n_part,
                    tol=tol,
                    max_iter=max_iter,
                    ridge=ridge,
                    attention_ridge=attention_ridge,
                    n_jobs=n_jobs,
                    on_step=_told(steps, examples),
                )
            error = _error(examples, solution, n_jobs)
        n_iter += solution.n_steps
        n_products += solution.n_products
        n_few = examples.n_samples
    attention, projection = with_idle(solution.attention, solution.projection, n_idle * width)
    return Polish(
        layer=examples.units.layer(attention, projection, solution.intercept),
        attention=attention,
        error=error,
        parameter_error=solution.parameter_error,
        converged=solution.converged,
        n_iter=n_iter,
        n_products=n_products,
        n_samples=n_few,
        message=(
            f"{solution.message}; relative squared residual {error:.1e} on all samples, "
            f"solved on {n_few} of {examples.n_samples}"
        ),
    )


def _told(progress: Progress, examples: Examples) -> OnStep:
    """Return what tells `progress` of solver steps, as layers in the units of the data."""

    def on_step(attention: Array, projection: Array, intercept: Array) -> bool:
        return progress.step("step", lambda: examples.units.layer(attention, projection, intercept))

    return on_step


def _error(examples: Examples, solution: Solution, n_jobs: int | None) -> float:
    return residual_power(
        examples, solution.attention, solution.projection, solution.intercept, n_jobs=n_jobs
    )


def residual_of(examples: Examples, result: Polish | Heads, *, n_jobs: int | None = None) -> float:
    """Return the relative squared residual of a result on all samples."""
    if isinstance(result, Polish):
        return result.error
    return residual_power(examples, result.attention, result.projection, result.intercept, n_jobs=n_jobs)
