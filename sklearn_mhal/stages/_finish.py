"""The last digits on all samples: exact gradients, curvature from a part.

With noise the estimate is the least-squares solution on all samples, however many. Every
iteration takes the exact gradient, two passes over the data in bounded memory, and solves for
the step with the Gauss-Newton matrix of a part of the samples that fits in memory. The error
shrinks by the relative difference of the two matrices, a few per cent, each time.
"""

from __future__ import annotations

import numpy as np

from .._examples import Examples
from .._forward import Array
from .._linearisation import Linearisation, Subspace
from .._problem import bounded
from .._solver import GOOD_OFFSET, PATIENCE, STALLED, STALLED_OFFSET, OnStep, Solution, carry_on
from .._sums import gradient_all, regress_all

_FORCING = 0.01
_MAX_PRODUCTS = 100
# A millionth of a standard error left to go changes nothing that the data could tell.
_OFFSET = 1e-6
_HALVINGS = 6
_ROUNDING = 1e-13


def finish(
    examples: Examples,
    attention: Array,
    *,
    n_part: int,
    tol: float,
    max_iter: int,
    ridge: float,
    attention_ridge: float,
    n_jobs: int | None,
    on_step: OnStep = carry_on,
) -> Solution:
    """Converge on all samples.

    Parameters
    ----------
    examples : Examples
    attention : ndarray of shape (q, m * d)
        Stacked start, near the solution.
    n_part : int
        Samples that give the curvature.
    tol : float
        Relative accuracy of the attention at which to stop.
    max_iter : int
    ridge, attention_ridge : float
        Penalties, a mean over rows.
    n_jobs : int or None
    on_step : callable
        Told every accepted step; True stops.

    Returns
    -------
    Solution
    """
    part = examples.first(n_part).problem(ridge=ridge, attention_ridge=attention_ridge)
    n_rows = examples.n_samples * part.rows.rows_per_sample
    share = examples.n_samples / min(n_part, examples.n_samples)
    n_free = n_rows * examples.n_outputs - attention.size - attention.shape[1] * examples.n_outputs
    step = np.zeros_like(attention)
    loss, previous_length, error, halvings, n_products = np.inf, 0.0, np.inf, 0, 0
    projection, intercept = np.empty(0), np.empty(0)
    converged, message = False, f"stopped after max_iter={max_iter} steps"
    n_steps, direct = 0, False
    # A penalty makes the minimum worth reaching, and gives every valley an end.
    patience = max_iter if attention_ridge else PATIENCE

    def offset_of(decrease: float) -> float:
        # A step's length in standard errors, see _solver._relative_offset.
        return float(np.sqrt(max(decrease, 0.0) / attention.size * max(n_free, 1) / max(loss, 1e-300)))

    while n_steps < max_iter:
        trial = bounded(attention + step)
        projection, intercept = regress_all(examples, trial, ridge=ridge * n_rows, n_jobs=n_jobs)
        gradient, squares = gradient_all(examples, trial, projection, intercept, n_jobs=n_jobs)
        new_loss = squares + n_rows * (
            ridge * float(np.vdot(projection, projection)) + attention_ridge * float(np.vdot(trial, trial))
        )
        if new_loss > loss * (1.0 + _ROUNDING):
            step, halvings = 0.5 * step, halvings + 1
            if halvings <= _HALVINGS:
                continue
            # The quadratic model holds nowhere near: what was there before is the answer.
            projection, intercept = regress_all(examples, attention, ridge=ridge * n_rows, n_jobs=n_jobs)
            converged, message = False, "no step lowers the loss on all samples"
            break
        gained, attention, loss, halvings = loss - new_loss, trial, new_loss, 0
        stopped = n_steps > 0 and on_step(attention, projection, intercept)
        if converged:
            break
        if stopped:
            message = "stopped by a callback"
            break
        if n_steps >= patience and offset_of(gained) <= STALLED_OFFSET:
            message = STALLED
            break
        gradient -= attention_ridge * n_rows * attention
        linear = Linearisation(part, part.evaluate(attention))
        linear.gradient = gradient / share
        if direct:
            step, decrease = linear.direct_step(0.0)
        else:
            step, decrease, spent = linear.step(
                0.0, forcing=_FORCING, max_products=_MAX_PRODUCTS, known=Subspace(attention.shape)
            )
            n_products += spent
            direct = linear.direct and spent >= _MAX_PRODUCTS
        n_steps += 1
        length = float(np.linalg.norm(step) / max(float(np.linalg.norm(attention)), 1e-300))
        contraction = min(1.0, length / previous_length) if previous_length else 1.0
        previous_length = length
        error = length * contraction
        offset = offset_of(decrease * share)
        if error <= tol or offset * contraction <= (_OFFSET if n_steps < patience else GOOD_OFFSET):
            # The step itself is still taken: the loop ends after its projections.
            converged, message = True, "the steps have become smaller than the tolerance"
    return Solution(
        attention=attention,
        projection=projection,
        intercept=intercept,
        error=loss / n_rows / examples.n_outputs,
        parameter_error=error,
        converged=converged,
        n_steps=n_steps,
        n_products=n_products,
        message=message,
    )
