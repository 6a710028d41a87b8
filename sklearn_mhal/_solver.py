"""Levenberg-Marquardt on the attention matrices, the projections eliminated exactly.

The problem is in :mod:`._problem`, a step's equations in :mod:`._linearisation`; here are the
damping, the stopping rules and the estimates of what is left to go.

All problems here are many small products: the caller limits BLAS to one thread (two spinning
thread pools, numpy's and scipy's, make the same fit an order of magnitude slower), and the
samples of large ones are shared among threads (:mod:`._threads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ._forward import Array
from ._linearisation import Linearisation, Subspace
from ._problem import Problem, State, bounded

_STEP_REJECTIONS = 10
# Relative squared residual that is rounding, whichever step is taken.
_ROUNDING = 1e-28
_DAMPING = 1e-2
_DAMPING_FLOOR = 1e-14
_MARGIN = 30.0
_FORCING_FLOOR = 1e-4
# Of the root of what is asked for: a solve that leaves a quarter of it has a margin for curvature.
_ENOUGH = 0.5
# A step near zero that leaves more than this share of the error is not Newton's method at work.
_CREEPING = 0.25
# Steps shorter than this, relatively, leave the normal equations nearly as they were.
_SETTLED = 0.1
# A hundredth of a standard error left to go is nothing that data could tell. Where the curvature is good
# the last digits cost little all the same; after so many steps they are let go.
GOOD_OFFSET = 1e-2
PATIENCE = 25
# After as many, steps that gain less than this are not worth their time: superfluous heads fit noise
# along valleys without an end.
STALLED_OFFSET = 0.1
# A fit that is no trial but the answer is given longer: most valleys do end.
_LONG_PATIENCE = 60
_INSIDE = "inside the basin of an exact solution"
STALLED = "stopped: the last step gained less than a tenth of a standard error"


@dataclass(frozen=True)
class Solution:
    """Where Levenberg-Marquardt ended and why."""

    attention: Array
    projection: Array
    intercept: Array
    error: float
    """Relative squared residual (plus penalties) on the rows solved."""
    parameter_error: float
    """Estimate of the relative distance to the limit, from the last steps' contraction."""
    converged: bool
    """Whether `parameter_error` fell under the tolerance, or what is left to go is nothing against
    the uncertainty that the residual implies."""
    n_steps: int
    n_products: int
    """Number of derivative-product pairs."""
    message: str


def _relative_offset(problem: Problem, state: State, decrease: float) -> float:
    """Return a step's length in standard errors of the attention, in root mean square.

    Bates and Watts (1981), "A relative offset orthogonality convergence criterion for nonlinear
    least squares": what a step can still gain, against what the residual's own chance is worth.
    Infinite where the residual has no degrees of freedom to tell chance by.
    """
    n_coordinates, n_linear = state.attention.size, state.regression.projection.size
    # A penalised parameter brings an equation of its own.
    n_free = problem.labels.size
    n_free -= 0 if problem.attention_ridge else n_coordinates
    n_free -= 0 if problem.ridge else n_linear
    loss = state.error * problem.label_power
    if not loss > 0.0:
        return 0.0
    if n_free <= 0:
        return np.inf
    return float(np.sqrt(max(decrease, 0.0) / n_coordinates * n_free / loss))


def _relative_length(step: Array, attention: Array) -> float:
    return float(np.linalg.norm(step) / max(float(np.linalg.norm(attention)), 1e-300))


def steps(
    problem: Problem,
    attention: Array,
    *,
    max_products: int = 100,
    stop_below: float = 0.0,
) -> Iterator[tuple[State, float, float, int]]:
    """Yield ``(state, parameter error, relative offset, products so far)`` after every accepted step.

    Both estimate what is left to go: the error relative to the parameters, the offset to their
    standard errors.

    The sequence ends where no step lowers the loss any more. A start where rounding is all that is
    left is yielded as it is.
    """
    state = problem.evaluate(attention)
    # A start that all but fits is in reach of Newton's method, which damping would only slow down.
    damping = min(_DAMPING, state.error)
    previous_length = 0.0
    n_products = spent = 0
    direct = False
    known = Subspace(state.attention.shape)
    while state.error > 0.0:
        linear = Linearisation(problem, state)
        # As exact as the residual is small: the steps then still converge superlinearly.
        # The floor is what products in single precision can deliver; gradient, residual and
        # projections are double, so a further step gains as many digits again. Nor more exact than
        # the error to stop at asks for, since what a solve leaves of the error is its square.
        wanted = _ENOUGH * np.sqrt(stop_below / state.error)
        forcing = min(0.3, max(np.sqrt(min(state.error, 1.0)), _FORCING_FLOOR, wanted))
        growth = 4.0
        for _ in range(_STEP_REJECTIONS):
            if direct:
                step, decrease = linear.direct_step(damping)
            else:
                step, decrease, spent = linear.step(
                    damping, forcing=forcing, max_products=max_products, known=known
                )
                n_products += spent
            trial = problem.evaluate(bounded(state.attention + step))
            if trial.error < state.error or decrease < 1e-15 * state.error * problem.label_power:
                break
            known.clear()
            # Faster and faster: the floor is twelve orders below where every step is accepted.
            damping *= growth
            growth *= 2.0
        else:
            if not previous_length and state.error < _ROUNDING:
                yield state, _relative_length(step, state.attention), 0.0, n_products
            return
        # Where conjugate gradients run into their limit, steps are neither exact nor cheap.
        direct = direct or (linear.direct and spent >= max_products)
        length = _relative_length(step, trial.attention)
        if length < _SETTLED and state.error < _SETTLED:
            known.use()
        else:
            known.clear()
        # The first step knows nothing of the contraction, so it counts in full.
        contraction = max(length / previous_length, forcing) if previous_length else 1.0
        # Without noise the residual itself tells: it shrinks in proportion to the distance, up to
        # directions that few rows determine, for which the margin is.
        shrinkage = _MARGIN * np.sqrt(trial.error / state.error) if state.error > 0.0 else 1.0
        contraction = min(1.0, contraction, shrinkage)
        previous_length = length
        stalled = not trial.error < state.error
        if not stalled:
            state = trial
        damping = max(damping / 8.0, _DAMPING_FLOOR)
        offset = contraction * _relative_offset(problem, state, decrease)
        yield state, length * contraction, offset, n_products
        if stalled:
            return


OnStep = Callable[[Array, Array, Array], bool]
"""Told attention, projection and intercept after a step; returns whether to stop."""


def carry_on(attention: Array, projection: Array, intercept: Array) -> bool:
    """Take no notice of a step."""
    return False


def solve(
    problem: Problem,
    attention: Array,
    *,
    tol: float = 1e-10,
    max_iter: int = 100,
    max_products: int = 100,
    patience: int = 2,
    give_up_above: float = 0.0,
    stop_below: float = 0.0,
    on_step: OnStep = carry_on,
) -> Solution:
    """Run Levenberg-Marquardt from one start.

    Parameters
    ----------
    attention : ndarray of shape (q, m * d)
        Stacked start.
    tol : float
        Stop when the estimated relative parameter error falls under it.
    max_iter : int
        Largest number of accepted steps.
    max_products : int
        Largest number of conjugate-gradient iterations a step.
    patience : int
        With `give_up_above`: over how many steps the error's fall is judged.
    give_up_above : float
        Abandon the start when the error is above this and falls by less than 4 % a step, or is below
        and falls by less than three quarters.
    stop_below : float
        Stop when the error falls under it, well inside the basin of an exact solution.
    on_step : callable
        Told every accepted step; True stops.

    Returns
    -------
    Solution
    """
    state = problem.evaluate(attention)
    parameter_error, n_steps, n_products = np.inf, 0, 0
    # Constant labels leave nothing to do.
    settled = state.error == 0.0
    history = [state.error]
    message = "no step lowers the loss"
    converged = False
    path = steps(problem, attention, max_products=max_products, stop_below=stop_below)
    if state.error < stop_below:
        path, message = iter(()), _INSIDE
    for state, parameter_error, offset, spent in path:
        n_steps, n_products = n_steps + 1, spent
        settled = offset <= GOOD_OFFSET
        history.append(state.error)
        stopped = on_step(state.attention, state.regression.projection, state.regression.intercept)
        if parameter_error <= tol:
            converged, message = True, "the steps have become smaller than the tolerance"
            break
        if settled and n_steps >= PATIENCE and not problem.attention_ridge:
            message = "what is left to go is nothing against the standard errors"
            break
        gained = (history[-2] - history[-1]) * problem.label_power
        # A penalty makes the minimum worth reaching, and gives every valley an end.
        if (
            n_steps >= (PATIENCE if give_up_above else _LONG_PATIENCE)
            and not problem.attention_ridge
            and _relative_offset(problem, state, gained) <= STALLED_OFFSET
        ):
            message = STALLED
            break
        if state.error < stop_below:
            message = _INSIDE
            break
        if stopped:
            message = "stopped by a callback"
            break
        if n_steps >= max_iter:
            message = f"stopped after max_iter={max_iter} steps"
            break
        slow = len(history) > patience and state.error > 0.96**patience * history[-1 - patience]
        # Newton's method takes digits here, but where superfluous heads leave a valley without an end.
        slow = slow or (state.error < give_up_above and state.error > _CREEPING * history[-2])
        if give_up_above > 0.0 and state.error > min(stop_below, give_up_above) and slow:
            far = state.error > give_up_above
            message = f"abandoned: the residual has stopped falling {'far from' if far else 'near'} zero"
            break
    return Solution(
        attention=state.attention,
        projection=state.regression.projection,
        intercept=state.regression.intercept,
        error=state.error,
        parameter_error=parameter_error,
        converged=converged or settled,
        n_steps=n_steps,
        n_products=n_products,
        message=message,
    )
