"""Convex bodies given by rows, each row judged by its own margin; the error of an untrusted answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ._forward import Array

Equalities = tuple[Array, Array, Array | float]
HalfSpaces = tuple[Array, Array]

# A hundred times what the convex solver aims at, so that only a wrong answer trips it.
RTOL = 1e-6
# What rounding does to an inner product with a unit row, relative to the point's norm.
_ROUNDING = 64 * float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)
LOOSEN = "Lower the margins, widen the tolerances or drop the least certain rows."
REPLACE = "Use fewer or better scaled rows, or take this estimate from another source."


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


@dataclass(frozen=True, eq=False)
class Polyhedron:
    """Half-spaces ``rows @ x >= margins``, rows of unit norm.

    Attributes
    ----------
    stage : str
        Who asks, for errors.
    rows : ndarray of shape (n_rows, n_variables)
    margins, scales : ndarray of shape (n_rows,)
        Each row may be missed by 1e-6 of its own scale: its margin or, for the two sides of
        an equality, the tolerance.
    """

    stage: str
    rows: Array
    margins: Array
    scales: Array

    @property
    def width(self) -> int:
        """Number of variables."""
        return int(self.rows.shape[1])

    def missed(self, point: Array) -> Array:
        """Return by how much a point misses each row; negative inside."""
        return np.asarray(self.margins - self.rows @ point)

    def allowed(self, point: Array) -> float:
        """Return what a solver may miss any row by: it is accurate relative to the largest margin."""
        return RTOL * max(float(np.linalg.norm(point)), float(np.max(self.margins, initial=0.0)))

    def violations(self, point: Array) -> Array:
        """Return how much of its own scale each row is missed by, beyond rounding."""
        rounding = _ROUNDING * float(np.linalg.norm(point)) + _TINY
        return np.maximum(self.missed(point) - rounding, 0.0) / np.maximum(self.scales, rounding)

    def checked(self, point: Array) -> tuple[Array, float]:
        """Return a solver's point, repaired within the solver's accuracy, and its worst violation.

        Raises
        ------
        ConvexProgramError
            If it misses a row by more than that accuracy, or still by more than 1e-6 of the
            row's own scale after the repair.
        """
        missed, allowed = float(np.max(self.missed(point), initial=0.0)), self.allowed(point)
        if missed <= allowed:
            point = self._repaired(point)
        worst = float(np.max(self.violations(point), initial=0.0))
        # Written so that NaN fails as well.
        if not (missed <= allowed and worst <= RTOL):
            quantity = (
                f"the point called optimal misses a row of unit norm by {missed:.2g} "
                f"and a row by {worst:.2g} of its own margin"
            )
            raise ConvexProgramError(self.stage, quantity, f"at most {allowed:.2g} and {RTOL:g}", REPLACE)
        return point, worst

    def _repaired(self, point: Array) -> Array:
        # A row whose margin is a million times below the largest is met by the shortest step
        # to all the rows nearby.
        if not self.violations(point).any():
            return point
        missed = self.missed(point)
        near = missed > -100.0 * missed.max()
        step, _ = least_distance(self.rows[near], missed[near])
        return point + step


def least_distance(rows: Array, margins: Array) -> tuple[Array, Array]:
    """Return the shortest x with ``rows @ x >= margins`` and the rows' multipliers.

    Exact to rounding where it succeeds and zero where it does not: a proposal, to be checked.

    References
    ----------
    Lawson and Hanson, "Solving Least Squares Problems", chapter 23: non-negative least
    squares on the rows and margins, stacked.
    """
    nothing = np.zeros(rows.shape[1]), np.zeros(len(rows))
    unit = float(np.max(margins, initial=0.0))
    if unit == 0.0:
        return nothing
    system = np.vstack([rows.T, margins / unit])
    target = np.append(np.zeros(rows.shape[1]), 1.0)
    try:
        weights = nnls(system, target)[0]
    except RuntimeError:  # Its iterations ran out.
        return nothing
    residual = system @ weights - target
    if residual[-1] == 0.0:
        return nothing
    return -unit * residual[:-1] / residual[-1], -unit * weights / residual[-1]


def as_array(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    """Return a finite float array of the wanted shape (None: any size), or raise ValueError."""
    array = np.asarray(value, dtype=np.float64)
    fits = array.ndim == len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must have shape {shape} (None is any size), got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinity.")
    return array


def make_polyhedron(
    stage: str, width: int, equalities: Equalities | None, halfspaces: HalfSpaces | None
) -> Polyhedron:
    """Check the rows and scale them to unit norm; an equality becomes two half-spaces."""
    nothing = np.empty((0, width)), np.empty(0)
    rows, margins = nothing if halfspaces is None else halfspaces
    rows = as_array("half-space rows", rows, (None, width))
    margins = as_array("margins", margins, (len(rows),))
    equal, targets, tolerance = (*nothing, 1.0) if equalities is None else equalities
    equal = as_array("equality rows", equal, (None, width))
    targets = as_array("equality targets", targets, (len(equal),))
    tolerance = as_array("tolerance", np.broadcast_to(tolerance, len(equal)), (len(equal),))
    if (tolerance <= 0.0).any():
        raise ValueError("tolerance must be positive.")
    scales = np.concatenate([np.abs(margins), tolerance, tolerance])
    rows = np.concatenate([rows, equal, -equal])
    margins = np.concatenate([margins, targets - tolerance, -targets - tolerance])
    norms = np.linalg.norm(rows, axis=1)
    if (margins[norms == 0.0] > 0.0).any():
        raise ConvexProgramError(stage, "a row of zeros has a positive margin", "a margin <= 0", LOOSEN)
    kept = norms > 0.0
    norms = norms[kept]
    return Polyhedron(stage, rows[kept] / norms[:, None], margins[kept] / norms, scales[kept] / norms)
