"""Convex programs on plain arrays; the only importer of cvxpy.

One question about the body ``{x : G x >= h, |A x - b| <= tolerance}``: which of its points is
nearest to an anchor. A solver's word is never enough. CLARABEL is named, only its status
"optimal" is accepted, every row is checked again by :class:`._polyhedron.Polyhedron`, and the
optimum against a bound that the multipliers prove. What fails raises :class:`ConvexProgramError`.

Few rows matter to an optimum, and the solver's time grows with all of them. So rows enter as
cutting planes: solve with some, add those that the solution misses, repeat.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg

from ._forward import Array
from ._polyhedron import (
    LOOSEN,
    REPLACE,
    RTOL,
    ConvexProgramError,
    Equalities,
    HalfSpaces,
    Polyhedron,
    as_array,
    least_distance,
    make_polyhedron,
)

__all__ = ["ConvexProgramError", "ConvexResult", "minimum_norm_point"]

# Rows come with unit norm already. A squared norm known to 1e-10 leaves the point uncertain by 1e-5 of
# its norm.
_SOLVER_OPTIONS: dict[str, Any] = {
    "direct_solve_method": "qdldl",
    "equilibrate_enable": False,
    "tol_gap_abs": 1e-10,
    "tol_gap_rel": 1e-10,
}


@dataclass(frozen=True, eq=False)
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
        `value` is the objective, within a millionth of what its multipliers prove.

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
    width = _width(given if anchor is None else [np.atleast_2d(anchor)])
    anchor = np.zeros(width) if anchor is None else as_array("anchor", anchor, (width,))
    body = make_polyhedron(stage, width, equalities, halfspaces)
    # With ||T x - t||^2 + c twice the objective, w = T x - t turns the body into one whose
    # point nearest to the origin is wanted.
    factor, target, constant = _triangle(anchor, least_squares)
    rows = linalg.solve_triangular(factor, body.rows.T, trans="T").T
    norms = np.linalg.norm(rows, axis=1)
    moved = Polyhedron(
        stage, rows / norms[:, None], (body.margins - rows @ target) / norms, body.scales / norms
    )
    proposed = least_distance(moved.rows, moved.margins)[1] > 0.0
    point, multipliers = _cutting_planes(moved, proposed)
    value = 0.5 * float(point @ point)
    pull = moved.rows.T @ multipliers
    _check_gap(stage, value, float(moved.margins @ multipliers) - 0.5 * float(pull @ pull), unit=value)
    point = linalg.solve_triangular(factor, point + target)
    return _result(body, point, value + 0.5 * constant, multipliers, began)


def _width(matrices: list[Array]) -> int:
    if not matrices or np.ndim(matrices[0]) != 2:
        raise ValueError("give at least one matrix of rows, of shape (n_rows, n_variables).")
    return int(np.shape(matrices[0])[1])


def _triangle(anchor: Array, least_squares: Equalities | None) -> tuple[Array, Array, float]:
    """Return T (upper triangular), t and c: ``||T x - t||^2 + c`` is twice the objective."""
    width = len(anchor)
    if least_squares is None:
        return np.eye(width), anchor, 0.0
    matrix, targets, weights = least_squares
    matrix = as_array("least-squares rows", matrix, (None, width))
    targets = as_array("least-squares targets", targets, (len(matrix),))
    weights = as_array("weights", np.broadcast_to(weights, len(matrix)), (len(matrix),))
    if (weights < 0.0).any():
        raise ValueError("weights must not be negative.")
    weighted = np.sqrt(weights)[:, None] * np.column_stack([matrix, targets])
    stacked = np.concatenate([np.column_stack([np.eye(width), anchor]), weighted])
    triangle = linalg.qr(stacked, mode="r", overwrite_a=True)[0]
    constant = float(triangle[width, width] ** 2) if len(triangle) > width else 0.0
    return triangle[:width, :width], triangle[:width, width], constant


def _cutting_planes(body: Polyhedron, proposed: Array) -> tuple[Array, Array]:
    """Return the point nearest to the origin and the rows' multipliers.

    `proposed` is a mask of rows to begin with, which may be empty.
    """
    point, multipliers = np.zeros(body.width), np.zeros(len(body.rows))
    working = proposed if proposed.any() else _with_most_missed(body, point, proposed)
    n_solved = 0
    while np.count_nonzero(working) > n_solved:
        n_solved = int(np.count_nonzero(working))
        few = Polyhedron(body.stage, body.rows[working], body.margins[working], body.scales[working])
        point, multipliers[working] = _nearest(few)
        working = _with_most_missed(body, point, working)
    return point, multipliers


def _with_most_missed(body: Polyhedron, point: Array, working: Array) -> Array:
    missed = np.where(working, -np.inf, body.missed(point))
    # Less than this is repaired in the end, without the solver.
    if not (missed > 0.1 * body.allowed(point)).any():
        return working
    working = working.copy()
    working[np.argsort(-missed)[: 4 * body.width]] = True
    return working


def _nearest(body: Polyhedron) -> tuple[Array, Array]:
    """Return the point of a body of few rows nearest to the origin, and the rows' multipliers."""
    import cvxpy as cp

    basis = _span(body.rows)
    # Bodies far from the origin are called empty; in this unit the nearest point is near 1.
    unit = float(body.margins.max())
    variable = cp.Variable(basis.shape[1])
    inside = (body.rows @ basis) @ variable >= body.margins / unit
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(variable)), [inside])
    point, multipliers = _solve(body.stage, problem, variable, inside)
    return unit * (basis @ point), unit * multipliers


def _span(rows: Array) -> Array:
    """Return orthonormal columns whose span holds the rows: optima lie there."""
    if len(rows) >= rows.shape[1]:
        return np.eye(rows.shape[1])
    return np.asarray(linalg.qr(rows.T, mode="economic")[0])


def _solve(stage: str, problem: Any, variable: Any, inside: Any) -> tuple[Array, Array]:
    """Run the solver; return the values of the variable and the multipliers, or raise."""
    import cvxpy as cp

    try:
        with warnings.catch_warnings():
            # cvxpy only warns of an inaccurate solution. Here it is an error.
            warnings.simplefilter("ignore")
            problem.solve(solver=cp.CLARABEL, **_SOLVER_OPTIONS)
    except Exception as error:
        quantity = f"the solver raised {type(error).__name__}"
        raise ConvexProgramError(stage, quantity, "a solution", REPLACE) from error
    if problem.status != cp.OPTIMAL:
        remedy = LOOSEN if "infeasible" in str(problem.status) else REPLACE
        raise ConvexProgramError(stage, f"the solver's status is {problem.status!r}", "'optimal'", remedy)
    if variable.value is None or inside.dual_value is None:
        raise ConvexProgramError(stage, "the solver returned no values", "a solution", REPLACE)
    return np.asarray(variable.value), np.maximum(np.asarray(inside.dual_value), 0.0)


def _check_gap(stage: str, value: float, bound: float, *, unit: float) -> None:
    gap = abs(bound - value)
    # Written so that NaN fails as well.
    if not gap <= RTOL * unit:
        quantity = f"the value called optimal is {gap:.2g} away from the bound its multipliers prove"
        raise ConvexProgramError(stage, quantity, f"at most {RTOL * unit:.2g}", REPLACE)


def _result(body: Polyhedron, point: Array, value: float, multipliers: Array, began: float) -> ConvexResult:
    point, violation = body.checked(point)
    n_holding = int(np.count_nonzero(multipliers > RTOL * np.max(multipliers, initial=0.0)))
    message = f"{n_holding} of {len(body.rows)} half-spaces hold the point"
    return ConvexResult(value, point, "optimal", time.perf_counter() - began, violation, message)
