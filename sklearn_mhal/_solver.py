"""Levenberg-Marquardt on the attention matrices, the projections eliminated exactly.

For fixed attention the model is linear, ``Y ~ D W`` with the design ``D = [phi_1, ..., phi_m]``
(and a column of ones for the intercept), so ``W`` is a least-squares solution and only the
attention remains: variable projection (Golub and Pereyra 1973) with Kaufman's Jacobian
``J v = -(I - D D^+) (dD[v] W)``. A step solves ``(J^T J + damping) v = -J^T r`` by conjugate
gradients, preconditioned with the Kronecker product ``mean(q q^T) (x) mean(C C^T)``, where
``C`` stacks the ``C_i = Cov_{p_i}(x) W_i``: the exact expectation of ``J^T J`` when queries and
patterns are independent.

All problems here are small and many: the caller limits BLAS to one thread (two spinning
thread pools, numpy's and scipy's, make the same fit an order of magnitude slower).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular

from ._forward import Array, TokenRows

_STEP_REJECTIONS = 10
_DAMPING = 1e-2
_DAMPING_FLOOR = 1e-14
_BLOCK_OVERSAMPLING = 16
# A residual above this share of the labels (squared) owes nothing to rounding.
_PLAIN = 1e-6
_MARGIN = 30.0
_FORCING_FLOOR = 1e-4
# Steps shorter than this, relatively, leave the normal equations nearly as they were.
_SETTLED = 0.1
_SUBSPACE_NUMBERS = 2_000_000
_NEARLY_EXACT = 1e-5
# Label power about the mean below this share of all there is, is rounding.
_CONSTANT = 1e-24
# Pooled tokens of a mean square below this are rounding.
_VANISHED = 1e-12
# Derivatives below this share of the labels (squared) are rounding.
_SATURATED = 1e-16
_LARGEST_SCORE = 1e8
# A hundredth of a standard error left to go is nothing that data could tell.
_OFFSET = 1e-2


@dataclass(frozen=True)
class Regression:
    """Projections for given attention: the linear half of the problem."""

    projection: Array
    """``(m * d, d_out)``."""
    intercept: Array
    """``(d_out,)``, zeros if none is fitted."""
    residual: Array
    """``(n_rows, d_out)``, weighted."""
    loss: float
    """``|residual|^2`` plus the ridge term."""
    design: Array
    factor: Array

    def orthonormal(self) -> Array:
        """Return a basis ``Z`` with ``I - Z Z^T`` the projector that removes the design."""
        return solve_triangular(self.factor, self.design.T, lower=True, check_finite=False).T


def factorise(gram: Array, *, n_rows: int = 0) -> Array:
    """Return the lower Cholesky factor of the Gram matrix of some rows, which is overwritten.

    A floor makes it exist where heads coincide; refinement and the residual, computed from the
    labels themselves, do not feel it elsewhere. White tokens that average to less than rounding
    explain nothing.
    """
    diagonal = np.einsum("ii->i", gram)
    floor = 1e-14 * max(float(diagonal.max(initial=1e-300)), _VANISHED * n_rows)
    while True:
        try:
            diagonal += floor
            return np.asarray(cholesky(gram, lower=True, check_finite=False))
        except LinAlgError:
            floor *= 100.0


def regress(
    pooled: Array, labels: Array, *, row_scale: Array | None, fit_intercept: bool, ridge: float
) -> Regression:
    """Solve for the projections by normal equations, with one step of iterative refinement if it shows."""
    n_columns = pooled.shape[1]
    design = pooled
    if fit_intercept:
        ones = np.ones(len(pooled)) if row_scale is None else row_scale
        design = np.concatenate([pooled, ones[:, None]], axis=1)
    gram = design.T @ design
    np.einsum("ii->i", gram)[:n_columns] += ridge
    right = design.T @ labels
    factor = factorise(gram, n_rows=len(design))
    solution = cho_solve((factor, True), right, check_finite=False)
    residual = labels - design @ solution
    if np.vdot(residual, residual) <= _PLAIN * np.vdot(labels, labels):
        defect = design.T @ residual
        defect[:n_columns] -= ridge * solution[:n_columns]
        solution += cho_solve((factor, True), defect, check_finite=False)
        residual = labels - design @ solution
    projection = solution[:n_columns]
    return Regression(
        projection=projection,
        intercept=solution[-1] if fit_intercept else np.zeros(labels.shape[1]),
        residual=residual,
        loss=float(np.vdot(residual, residual) + ridge * np.vdot(projection, projection)),
        design=design,
        factor=factor,
    )


@dataclass
class Problem:
    """One nonlinear least-squares problem: rows, labels, penalties.

    ``|Y - F(attention)|^2 + ridge |W|^2 + attention_ridge |attention|^2``, with `labels` already
    multiplied by the root weights of `rows`.
    """

    rows: TokenRows
    labels: Array
    fit_intercept: bool = False
    ridge: float = 0.0
    attention_ridge: float = 0.0
    label_power: float = field(init=False)
    query_moment: Array = field(init=False)

    def __post_init__(self) -> None:
        centred = self.labels
        if self.fit_intercept and len(centred):
            scale = self.rows.row_scale
            ones = np.ones(len(centred)) if scale is None else scale
            mean = ones @ centred / max(float(ones @ ones), 1e-300)
            centred = centred - ones[:, None] * mean
        # Labels come with unit power; constant ones leave rounding, and one sample nothing.
        power, rounding = float(np.vdot(centred, centred)), _CONSTANT * max(centred.size, 1)
        self.label_power = max(power, rounding)
        queries = self.rows.queries
        moment = queries.T @ queries / max(len(queries), 1)
        # Tokens of zeros only have no scale, and any does.
        floor = 1e-8 * (float(np.trace(moment)) / len(moment) or 1.0)
        self.query_moment = moment + floor * np.eye(len(moment))

    @cached_property
    def single_rows(self) -> TokenRows:
        """The rows in single precision."""
        return self.rows.single()

    def penalised(self, ridge: float, attention_ridge: float) -> Problem:
        """Return the same equations with other penalties, a mean over rows."""
        n_rows = float(self.rows.n_rows)
        return replace(self, ridge=ridge * n_rows, attention_ridge=attention_ridge * n_rows)

    def evaluate(self, attention: Array) -> State:
        """Return everything known at one attention, the projections included."""
        patterns = self.rows.patterns(attention)
        regression = regress(
            self.rows.pooled(patterns),
            self.labels,
            row_scale=self.rows.row_scale,
            fit_intercept=self.fit_intercept,
            ridge=self.ridge,
        )
        penalty = self.attention_ridge * float(np.vdot(attention, attention))
        return State(attention, patterns, regression, (regression.loss + penalty) / self.label_power)


@dataclass(frozen=True)
class State:
    """The solver's position."""

    attention: Array
    patterns: Array
    regression: Regression
    error: float
    """Loss relative to the centred label power; without penalties the relative squared residual."""


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


class Linearisation:
    """The normal equations of one step: products, gradient and preconditioner."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem, self.state = problem, state
        regression = state.regression
        self.values = problem.rows.values(regression.projection)
        self.basis = regression.orthonormal()
        self.gradient = problem.rows.backward_product(regression.residual, state.patterns, self.values)
        if problem.attention_ridge:
            self.gradient -= problem.attention_ridge * state.attention
        self.block = self._head_block()
        self.fast = self._single()
        # Where every row is saturated nothing pulls, and steps must not grow for that.
        self.scale = max(float(np.trace(self.block)) / len(self.block), _SATURATED * problem.label_power)

    def _head_block(self) -> Array:
        """``sum over rows of C C^T``, every sample seen through as many outputs as are needed.

        All samples, because under hard attention a few soft rows carry almost everything;
        not all outputs, because the sum only has to be well conditioned.
        """
        rows, values = self.problem.rows, self.values
        n_outputs = values.shape[2]
        size = len(self.state.regression.projection)
        n_seen = int(np.clip(round(_BLOCK_OVERSAMPLING * size / len(rows.queries)), 1, n_outputs))
        if n_seen < n_outputs:
            first = n_seen * np.arange(rows.n_samples)[:, None, None]
            seen = (first + np.arange(n_seen)) % n_outputs
            values = np.take_along_axis(values, seen, axis=2) * np.sqrt(n_outputs / n_seen)
        values = values.reshape(rows.n_samples, -1, rows.n_tokens, n_seen)
        patterns = self.state.patterns.reshape(rows.n_samples, rows.n_queries, -1, rows.n_tokens)
        patterns = patterns.transpose(0, 2, 1, 3)
        spread = values[:, :, None] - (patterns @ values)[:, :, :, None]
        spread *= patterns[..., None]
        # C: (n, heads, queries, d, outputs) -> (heads * d, everything else)
        stacked = (rows.keys[:, None, None] @ spread).transpose(1, 3, 0, 2, 4).reshape(size, -1)
        # Averaging adds a sample's rows before squaring; their cross terms cancel on average
        # and the queries' own share is what remains.
        return stacked @ stacked.T

    def _single(self) -> tuple[TokenRows, Array, Array, Array, Array]:
        """Everything a product reads, in single precision."""
        values = self.values.astype(np.float32)
        return (
            self.problem.single_rows,
            self.state.patterns.astype(np.float32),
            values,
            TokenRows.transposed(values),
            self.basis.astype(np.float32),
        )

    def product(self, direction: Array) -> Array:
        """Return ``J^T J`` times a direction, in single precision."""
        rows, patterns, values, transposed, basis = self.fast
        # Where all rows are saturated directions are long beyond what single precision holds.
        unit = max(float(np.abs(direction).max(initial=0.0)), 1e-300)
        change = rows.forward_product((direction / unit).astype(np.float32), patterns, values)
        change -= basis @ (basis.T @ change)
        return unit * rows.backward_product(change, patterns, values, transposed).astype(np.float64)

    def exact_product(self, direction: Array) -> Array:
        """Return ``J^T J`` times a direction, in double precision."""
        rows, patterns = self.problem.rows, self.state.patterns
        change = rows.forward_product(direction, patterns, self.values)
        change -= self.basis @ (self.basis.T @ change)
        return rows.backward_product(change, patterns, self.values)

    def step(
        self, damping: float, *, forcing: float, max_products: int, known: Subspace
    ) -> tuple[Array, float, int]:
        """Solve for a step; return it, the predicted decrease of the loss and the products spent."""
        shift = damping * self.scale + self.problem.attention_ridge
        block = self.block + max(shift, 1e-10 * self.scale) * np.eye(len(self.block))
        left = np.linalg.inv(self.problem.query_moment)
        right = np.linalg.inv(block)

        def precondition(vector: Array) -> Array:
            return known.precondition(vector, lambda inner: left @ inner @ right)

        residual = self.gradient.copy()
        step = np.zeros_like(residual)
        search = preconditioned = precondition(residual)
        power = first = float(np.vdot(residual, preconditioned))
        n_products = 0
        gained, attainable = 0.0, np.inf
        if self.state.error < _NEARLY_EXACT:
            # Where the labels are all but explained, what a step can gain is the whole loss, and
            # that measures the error in the norm that counts; a small preconditioned residual
            # does not, when few rows carry some directions.
            attainable, first = self.state.regression.loss, 1e-4 * first
            max_products *= 3
        while (
            power > forcing**2 * first
            and n_products < max_products
            and gained < (1.0 - forcing**2) * attainable
        ):
            image = self.product(search) + shift * search
            curvature = float(np.vdot(search, image))
            n_products += 1
            if not curvature > 0.0:
                break
            known.collect(search, image, curvature)
            length = power / curvature
            gained += length * power
            step += length * search
            residual -= length * image
            preconditioned = precondition(residual)
            previous, power = power, float(np.vdot(residual, preconditioned))
            search = preconditioned + (power / previous) * search
        return step, float(np.vdot(step, self.gradient)), n_products


class Subspace:
    """Conjugate directions that earlier solves explored, as a preconditioner.

    With directions ``S`` and images ``A S`` of the matrix as it was, the preconditioner
    ``(I - S K (A S)^T) M (I - A S K S^T) + S K S^T``, ``K = (S^T A S)^-1``, is exact on the subspace
    and positive definite whatever the matrix has become since: near the solution it hardly
    changes from step to step, so its slow directions need to be found only once.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        width = int(np.prod(shape))
        self.capacity = int(np.clip(_SUBSPACE_NUMBERS // max(width, 1), 16, 512))
        self.directions = np.empty((self.capacity, width), dtype=np.float32)
        self.images = np.empty((self.capacity, width), dtype=np.float32)
        self.inverse = np.empty((0, 0), dtype=np.float32)
        self.n_collected = 0

    def collect(self, direction: Array, image: Array, curvature: float) -> None:
        """Remember a direction of the solve in progress; one beyond the capacity is dropped."""
        if self.n_collected < self.capacity:
            # Unit curvature keeps single precision away from under- and overflow.
            root = np.sqrt(curvature)
            self.directions[self.n_collected] = direction.ravel() / root
            self.images[self.n_collected] = image.ravel() / root
            self.n_collected += 1

    def use(self) -> None:
        """Let the following solves use what was collected."""
        used = slice(0, self.n_collected)
        small = (self.directions[used] @ self.images[used].T).astype(np.float64)
        values, vectors = np.linalg.eigh(0.5 * (small + small.T))
        # Exact conjugacy would make every value 1; what rounding left nearly dependent is cut.
        kept = vectors[:, values > 1e-3]
        self.inverse = ((kept / values[values > 1e-3]) @ kept.T).astype(np.float32)

    def clear(self) -> None:
        """Forget everything: the equations have changed."""
        self.inverse = np.empty((0, 0), dtype=np.float32)
        self.n_collected = 0

    def precondition(self, vector: Array, inner: Callable[[Array], Array]) -> Array:
        """Return what the preconditioner `inner` makes of a vector, exact on the subspace."""
        if not len(self.inverse):
            return inner(vector)
        used = slice(0, len(self.inverse))
        directions, images = self.directions[used], self.images[used]
        flat = vector.ravel().astype(np.float32)
        share = self.inverse @ (directions @ flat)
        rest = inner((flat - share @ images).astype(np.float64).reshape(self.shape)).ravel()
        share -= self.inverse @ (images @ rest.astype(np.float32))
        return (rest + share @ directions).reshape(self.shape)


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


def steps(
    problem: Problem,
    attention: Array,
    *,
    max_products: int = 100,
) -> Iterator[tuple[State, float, float, int]]:
    """Yield ``(state, parameter error, relative offset, products so far)`` after every accepted step.

    Both estimate what is left to go: the error relative to the parameters, the offset to their
    standard errors.

    The sequence ends where no step lowers the loss any more.
    """
    state = problem.evaluate(attention)
    # A start that all but fits is in reach of Newton's method, which damping would only slow down.
    damping = min(_DAMPING, state.error)
    previous_length = 0.0
    n_products = 0
    known = Subspace(state.attention.shape)
    while state.error > 0.0:
        linear = Linearisation(problem, state)
        # As exact as the residual is small: the steps then still converge superlinearly.
        # The floor is what products in single precision can deliver; gradient, residual and
        # projections are double, so a further step gains as many digits again.
        forcing = min(0.3, max(np.sqrt(min(state.error, 1.0)), _FORCING_FLOOR))
        growth = 4.0
        for _ in range(_STEP_REJECTIONS):
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
            return
        length = float(np.linalg.norm(step) / max(float(np.linalg.norm(trial.attention)), 1e-300))
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


def bounded(attention: Array) -> Array:
    """Return stacked attention for white tokens kept where scores still have digits.

    Patterns to noise are best when infinitely hard, and are as hard as any long before.
    """
    return np.clip(attention, -_LARGEST_SCORE, _LARGEST_SCORE)


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
        Abandon the start when the error is above this and falls by less than 4 % a step.
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
    for state, parameter_error, offset, spent in steps(problem, attention, max_products=max_products):
        n_steps, n_products = n_steps + 1, spent
        settled = offset <= _OFFSET
        history.append(state.error)
        stopped = on_step(state.attention, state.regression.projection, state.regression.intercept)
        if parameter_error <= tol:
            converged, message = True, "the steps have become smaller than the tolerance"
            break
        if state.error < stop_below:
            message = "inside the basin of an exact solution"
            break
        if stopped:
            message = "stopped by a callback"
            break
        if n_steps >= max_iter:
            message = f"stopped after max_iter={max_iter} steps"
            break
        slow = len(history) > patience and state.error > 0.96**patience * history[-1 - patience]
        if state.error > give_up_above > 0.0 and slow:
            message = "abandoned: the residual has stopped falling far from zero"
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
