"""Convex programs on plain arrays; the only importer of cvxpy.

Three questions about the body ``{x : G x >= h, |A x - b| <= tolerance}``: its point nearest
to an anchor, how far it extends in a direction, and a point deep inside it. A solver's word is
never enough. CLARABEL is named, only its status "optimal" is accepted, every row is checked
again here against its own margin, and the optimum against a bound that the multipliers prove.
What fails raises :class:`ConvexProgramError`.

Few rows matter to an optimum, and the solver's time grows with all of them. So rows enter as
cutting planes: solve with those most violated, add those the solution violates, repeat.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg
from scipy.optimize import nnls

from ._forward import Array

Equalities = tuple[Array, Array, Array | float]
HalfSpaces = tuple[Array, Array]

# A hundred times what CLARABEL aims at, so that only a wrong answer trips it.
_RTOL = 1e-6
# What rounding does to an inner product with a unit row, relative to the point's norm.
_ROUNDING = 64 * float(np.finfo(np.float64).eps)
_EMPTY = "Lower the margins, widen the tolerances or drop the least certain rows."
_UNSOLVED = "Use fewer or better scaled rows, or take this estimate from another source."


class ConvexProgramError(RuntimeError):
    """A convex program has no answer that can be trusted.

    Parameters
    ----------
    stage : str
        Which stage asked.
    quantity, threshold : str
        What was found, and what would have been accepted.
    remedy : str
        What the caller can do about it.
    """

    def __init__(self, stage: str, quantity: str, threshold: str, remedy: str) -> None:
        # The base class gets all four: that is what pickling between workers restores.
        super().__init__(stage, quantity, threshold, remedy)
        self.stage = stage
        self.quantity = quantity
        self.threshold = threshold
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.stage}: {self.quantity}; needed {self.threshold}. {self.remedy}"


@dataclass(frozen=True)
class ConvexResult:
    """An answer that passed every check.

    Attributes
    ----------
    value : float
        The objective at `point`.
    point : ndarray of shape (n_variables,)
    status : str
        The solver's status: "optimal".
    seconds : float
    violation : float
        Largest violation of a row beyond rounding, relative to that row's own margin (for an
        equality, its tolerance). Between 0 and 1e-6.
    message : str
        The outcome in words.
    """

    value: float
    point: Array
    status: str
    seconds: float
    violation: float
    message: str


@dataclass(frozen=True)
class _Body:
    """Half-spaces ``rows @ x >= margins`` with rows of unit norm, each with its own scale."""

    stage: str
    rows: Array
    margins: Array
    scales: Array

    def relative_violations(self, point: Array) -> Array:
        rounding = _ROUNDING * float(np.linalg.norm(point)) + float(np.finfo(np.float64).tiny)
        missed = self.margins - self.rows @ point - rounding
        return np.maximum(missed, 0.0) / np.maximum(self.scales, rounding)

    def checked(self, point: Array) -> tuple[Array, float]:
        """Return the point, repaired within the solver's accuracy, and its worst violation."""
        missed = float(np.max(self.margins - self.rows @ point, initial=0.0))
        allowed = _RTOL * max(float(np.linalg.norm(point)), float(np.max(self.margins, initial=0.0)))
        if missed <= allowed:
            point = self._repaired(point)
        worst = float(np.max(self.relative_violations(point), initial=0.0))
        # Written so that NaN fails as well.
        if not (missed <= allowed and worst <= _RTOL):
            raise ConvexProgramError(
                self.stage,
                f"the point called optimal misses a row of unit norm by {missed:.2g} "
                f"and a row by {worst:.2g} of its own margin",
                f"at most {allowed:.2g} and {_RTOL:g}",
                _UNSOLVED,
            )
        return point, worst

    def _repaired(self, point: Array) -> Array:
        # The solver is accurate relative to the largest margin. A row whose margin is a million
        # times smaller is met by the shortest step to all rows nearby, which non-negative least
        # squares finds to rounding (Lawson and Hanson, "Solving Least Squares Problems", chapter 23).
        if not self.relative_violations(point).any():
            return point
        missed = self.margins - self.rows @ point
        unit = float(missed.max())
        near = missed > -100.0 * unit
        system = np.vstack([self.rows[near].T, missed[near] / unit])
        target = np.append(np.zeros(len(point)), 1.0)
        try:
            residual = system @ nnls(system, target)[0] - target
        except RuntimeError:  # It did not converge; the check that follows says so.
            return point
        return point - unit * residual[:-1] / residual[-1] if residual[-1] else point


def _array(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    array = np.asarray(value, dtype=np.float64)
    fits = array.ndim == len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must have shape {shape} (None is any size), got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinity.")
    return array


def _make_body(stage: str, width: int, equalities: Equalities | None, halfspaces: HalfSpaces | None) -> _Body:
    nothing = np.empty((0, width)), np.empty(0)
    rows, margins = nothing if halfspaces is None else halfspaces
    rows = _array("half-space rows", rows, (None, width))
    margins = _array("margins", margins, (len(rows),))
    equal, targets, tolerance = (*nothing, 1.0) if equalities is None else equalities
    equal = _array("equality rows", equal, (None, width))
    targets = _array("equality targets", targets, (len(equal),))
    tolerance = _array("tolerance", np.broadcast_to(tolerance, len(equal)), (len(equal),))
    if (tolerance <= 0.0).any():
        raise ValueError("tolerance must be positive.")
    rows = np.concatenate([rows, equal, -equal])
    margins = np.concatenate([margins, targets - tolerance, -targets - tolerance])
    scales = np.concatenate([np.abs(margins[: len(margins) - 2 * len(equal)]), tolerance, tolerance])
    norms = np.linalg.norm(rows, axis=1)
    if (margins[norms == 0.0] > 0.0).any():
        raise ConvexProgramError(stage, "a row of zeros has a positive margin", "a margin <= 0", _EMPTY)
    kept = norms > 0.0
    norms = norms[kept]
    return _Body(stage, rows[kept] / norms[:, None], margins[kept] / norms, scales[kept] / norms)


def _solve(stage: str, problem: Any, variable: Any, constraint: Any) -> tuple[Array, Array]:
    """Run the solver; return the variable and the multipliers, or raise."""
    import cvxpy as cp

    try:
        with warnings.catch_warnings():
            # It warns of an inaccurate solution, which is an error here.
            warnings.simplefilter("ignore")
            problem.solve(solver=cp.CLARABEL, direct_solve_method="qdldl", equilibrate_enable=False)
    except Exception as error:
        quantity = f"the solver raised {type(error).__name__}"
        raise ConvexProgramError(stage, quantity, "a solution", _UNSOLVED) from error
    if problem.status != cp.OPTIMAL:
        remedy = _EMPTY if "infeasible" in str(problem.status) else _UNSOLVED
        raise ConvexProgramError(stage, f"the solver's status is {problem.status!r}", "'optimal'", remedy)
    if variable.value is None or constraint.dual_value is None:
        raise ConvexProgramError(stage, "the solver returned no values", "a solution", _UNSOLVED)
    return np.asarray(variable.value), np.maximum(np.asarray(constraint.dual_value), 0.0)


def _check_gap(stage: str, value: float, bound: float, scale: float) -> None:
    gap = abs(bound - value) / scale
    if not gap <= _RTOL:
        quantity = f"the value called optimal is {gap:.2g} away from the bound its multipliers prove"
        raise ConvexProgramError(stage, quantity, f"at most {_RTOL:g}", _UNSOLVED)


def _cutting_planes(
    body: _Body, start: Array, solve_subset: Callable[[Array, Array], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Return the optimum over all rows and their multipliers.

    `start` is the optimum without any row; `solve_subset` finds it for some rows and margins.
    """
    point, multipliers = start, np.zeros(len(body.rows))
    working = np.zeros(len(body.rows), dtype=bool)
    batch = max(2 * len(start), 100)
    while ((body.relative_violations(point) > 0.0) & ~working).any():
        missed = np.where(working, -np.inf, body.margins - body.rows @ point)
        working[np.argsort(-missed)[:batch]] = True
        point, found = solve_subset(body.rows[working], body.margins[working])
        multipliers[working] = found
    return point, multipliers


def _span(rows: Array) -> Array:
    """Return an orthonormal basis, as columns, that holds the rows; the identity if nothing is saved."""
    if len(rows) >= rows.shape[1]:
        return np.eye(rows.shape[1])
    return np.asarray(linalg.qr(rows.T, mode="economic")[0])


def _least_norm(stage: str, rows: Array, margins: Array) -> tuple[Array, Array]:
    import cvxpy as cp

    basis = _span(rows)
    # The solver calls bodies far from the origin empty; in this unit the nearest point is near 1.
    unit = margins.max()
    variable = cp.Variable(basis.shape[1])
    constraint = (rows @ basis) @ variable >= margins / unit
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(variable)), [constraint])
    point, multipliers = _solve(stage, problem, variable, constraint)
    return unit * (basis @ point), unit * multipliers


def minimum_norm_point(
    *,
    equalities: Equalities | None = None,
    halfspaces: HalfSpaces | None = None,
    least_squares: Equalities | None = None,
    anchor: Array | None = None,
    stage: str = "minimum-norm point",
) -> ConvexResult:
    """Return the point of a convex body nearest to an anchor.

    Minimises ``||x - anchor||^2 / 2 + sum_i w_i (c_i^T x - e_i)^2 / 2`` over the body.

    Parameters
    ----------
    equalities : (A, b, tolerance), default=None
        ``|A x - b| <= tolerance``; shapes (n_equalities, n_variables), (n_equalities,) and a
        positive scalar or one number a row.
    halfspaces : (G, h), default=None
        ``G x >= h``; shapes (n_halfspaces, n_variables) and (n_halfspaces,). Rows of any norm.
    least_squares : (C, e, w), default=None
        Equations to be met only in the mean, with weights ``w >= 0`` (scalar or one a row).
    anchor : ndarray of shape (n_variables,), default=None
        None means the origin.
    stage : str, default="minimum-norm point"
        Who asks; errors begin with it.

    Returns
    -------
    ConvexResult
        `value` is the objective.

    Raises
    ------
    ConvexProgramError
        If the body is empty or the solver's answer fails a check.
    ValueError
        If shapes do not fit together, a number is not finite, or nothing gives `n_variables`.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal._convex import minimum_norm_point
    >>> result = minimum_norm_point(halfspaces=(np.array([[3.0, 4.0]]), np.array([10.0])))
    >>> result.point.round(6)
    array([1.2, 1.6])
    """
    began = time.perf_counter()
    given = [pair[0] for pair in (halfspaces, equalities, least_squares) if pair is not None]
    if anchor is None and not given:
        raise ValueError("give at least one of equalities, halfspaces, least_squares and anchor.")
    width = np.shape(given[0])[-1] if anchor is None else len(anchor)
    anchor = np.zeros(width) if anchor is None else _array("anchor", anchor, (width,))
    body = _make_body(stage, width, equalities, halfspaces)
    # With ||T x - t||^2 equal to the objective up to a constant, w = T x - t makes it ||w||^2.
    factor, target, constant = np.eye(width), anchor, 0.0
    if least_squares is not None:
        factor, target, constant = _whitening(anchor, least_squares)
    rows = body.rows
    if least_squares is not None:
        rows = linalg.solve_triangular(factor, rows.T, trans="T").T
    norms = np.linalg.norm(rows, axis=1)
    moved = _Body(stage, rows / norms[:, None], (body.margins - rows @ target) / norms, body.scales / norms)
    point, multipliers = _cutting_planes(
        moved, np.zeros(width), lambda rows, margins: _least_norm(stage, rows, margins)
    )
    value = 0.5 * float(point @ point)
    pull = moved.rows.T @ multipliers
    bound = float(moved.margins @ multipliers) - 0.5 * float(pull @ pull)
    _check_gap(stage, value, bound, max(value, np.finfo(np.float64).tiny))
    point = linalg.solve_triangular(factor, point + target)
    return _result(body, point, value + 0.5 * constant, multipliers, began)


def _whitening(anchor: Array, least_squares: Equalities) -> tuple[Array, Array, float]:
    width = len(anchor)
    matrix, targets, weights = least_squares
    matrix = _array("least-squares rows", matrix, (None, width))
    targets = _array("least-squares targets", targets, (len(matrix),))
    weights = _array("weights", np.broadcast_to(weights, len(matrix)), (len(matrix),))
    if (weights < 0.0).any():
        raise ValueError("weights must not be negative.")
    root = np.sqrt(weights)[:, None]
    stacked = np.concatenate(
        [
            np.column_stack([np.eye(width), anchor]),
            np.column_stack([matrix, targets]) * root,
        ]
    )
    triangle = linalg.qr(stacked, mode="r", overwrite_a=True)[0]
    residual = float(triangle[width, width] ** 2) if len(triangle) > width else 0.0
    return triangle[:width, :width], triangle[:width, width], residual


def _result(body: _Body, point: Array, value: float, multipliers: Array, began: float) -> ConvexResult:
    point, violation = body.checked(point)
    n_active = int(np.count_nonzero(multipliers > _RTOL * multipliers.max(initial=0.0)))
    message = f"{n_active} of {len(body.rows)} half-spaces hold the point"
    return ConvexResult(value, point, "optimal", time.perf_counter() - began, violation, message)


def _furthest(
    stage: str, direction: Array, radius: float, rows: Array, margins: Array
) -> tuple[Array, Array]:
    import cvxpy as cp

    basis = _span(np.concatenate([rows, direction[None]]))
    variable = cp.Variable(basis.shape[1])
    constraint = (rows @ basis) @ variable >= margins / radius
    goal = cp.Maximize((direction @ basis) @ variable)
    problem = cp.Problem(goal, [constraint, cp.norm(variable, 2) <= 1.0])
    point, multipliers = _solve(stage, problem, variable, constraint)
    return radius * (basis @ point), multipliers


def support(
    direction: Array,
    *,
    radius: float,
    equalities: Equalities | None = None,
    halfspaces: HalfSpaces | None = None,
    stage: str = "support",
) -> ConvexResult:
    """Return how far a convex body, cut off by a ball, extends in a direction.

    Maximises ``direction^T x`` over the body and ``||x|| <= radius``.

    Parameters
    ----------
    direction : ndarray of shape (n_variables,)
        Not zero; need not have unit norm.
    radius : float
        Positive. Accuracy is relative to it, so take it not much larger than the body.
    equalities, halfspaces, stage
        As in :func:`minimum_norm_point`.

    Returns
    -------
    ConvexResult
        `value` is the maximum, `point` where it is reached.

    Raises
    ------
    ConvexProgramError, ValueError
        As in :func:`minimum_norm_point`.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal._convex import support
    >>> result = support(np.array([1.0, 0.0]), radius=5.0, halfspaces=(np.array([[-1.0, 0.0]]), np.array([-2.0])))
    >>> round(result.value, 6)
    2.0
    """
    began = time.perf_counter()
    direction, radius = _array("direction", direction, (None,)), _positive("radius", radius)
    length = _positive("the norm of direction", np.linalg.norm(direction))
    direction = direction / length
    body = _make_body(stage, len(direction), equalities, halfspaces)
    point, multipliers = _cutting_planes(
        body, radius * direction, lambda rows, margins: _furthest(stage, direction, radius, rows, margins)
    )
    value = float(direction @ point)
    pull = np.linalg.norm(direction + body.rows.T @ multipliers)
    bound = radius * float(pull) - float(body.margins @ multipliers)
    _check_gap(stage, value, bound, radius)
    return _result(body, point, length * value, multipliers, began)


def _positive(name: str, value: Any) -> float:
    value = float(_array(name, value, ()))
    if value <= 0.0:
        raise ValueError(f"{name} must be positive, got {value}.")
    return value


def _deepest(stage: str, radius: float, rows: Array, margins: Array) -> tuple[Array, Array]:
    import cvxpy as cp

    basis = _span(rows[:, :-1])
    variable, depth = cp.Variable(basis.shape[1]), cp.Variable()
    constraint = (rows[:, :-1] @ basis) @ variable - depth >= margins / radius
    problem = cp.Problem(cp.Maximize(depth), [constraint, cp.norm(variable, 2) + depth <= 1.0])
    point, multipliers = _solve(stage, problem, variable, constraint)
    return radius * np.append(basis @ point, float(depth.value)), multipliers


def feasible_point(
    *,
    radius: float,
    equalities: Equalities | None = None,
    halfspaces: HalfSpaces | None = None,
    stage: str = "feasible point",
) -> ConvexResult:
    """Return the centre of the largest ball inside a convex body that is cut off by a ball.

    Parameters
    ----------
    radius : float
        Positive: the body is cut off at ``||x|| <= radius``. Accuracy is relative to it.
    equalities, halfspaces, stage
        As in :func:`minimum_norm_point`.

    Returns
    -------
    ConvexResult
        `value` is the radius of the inscribed ball; 0 if the body is flat.

    Raises
    ------
    ConvexProgramError
        If the body is empty (the error says by how much) or the answer fails a check.
    ValueError
        As in :func:`minimum_norm_point`.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal._convex import feasible_point
    >>> square = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> result = feasible_point(radius=10.0, halfspaces=(square, np.array([0.0, -2.0, 0.0, -2.0])))
    >>> result.point.round(6), round(result.value, 6)
    (array([1., 1.]), 1.0)
    """
    began = time.perf_counter()
    radius = _positive("radius", radius)
    given = [pair[0] for pair in (halfspaces, equalities) if pair is not None]
    if not given:
        raise ValueError("give at least one of equalities and halfspaces.")
    width = np.shape(given[0])[-1]
    body = _make_body(stage, width, equalities, halfspaces)
    # One more variable: how deep inside every half-space, and inside the ball, the point is.
    lifted = np.column_stack([body.rows, -np.ones(len(body.rows))])
    lifted_body = _Body(stage, lifted, body.margins, body.scales)
    start = np.append(np.zeros(width), radius)
    point, multipliers = _cutting_planes(
        lifted_body, start, lambda rows, margins: _deepest(stage, radius, rows, margins)
    )
    depth = float(point[-1])
    pull = float(np.linalg.norm(body.rows.T @ multipliers))
    weight = pull + float(multipliers.sum())
    bound = radius if weight == 0.0 else (radius * pull - float(body.margins @ multipliers)) / weight
    _check_gap(stage, depth, bound, radius)
    if bound < -_RTOL * radius:
        quantity = f"every point within radius {radius:.3g} misses a row of unit norm by {-depth:.2g}"
        raise ConvexProgramError(stage, quantity, "a point that meets all rows", _EMPTY)
    return _result(body, point[:-1], max(depth, 0.0), multipliers, began)
