"""The convex body around the attention matrices, as an object to ask.

Vectors here are stacked attention matrices of one head, flattened: ``vec([Theta; u])`` of length
``D = q d`` in internal units.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from .._convex import ConvexProgramError, minimum_norm_point
from .._forward import Array
from .._units import Units
from ._result import logger

# Eigenvalues of the equality moments below this square, relative, are rounding.
_NOT_HELD = 1e-7
# Half-spaces of a body, in units of its dimension and at most.
_HALF_SPACES_PER_COORDINATE, _MAX_HALF_SPACES = 16, 2000
# Bytes of a pickle that are no numbers.
_ROOM_OF_NAMES = 600


def most_half_spaces(dimension: int) -> int:
    """Return how many half-spaces a body of a dimension may keep."""
    return min(_HALF_SPACES_PER_COORDINATE * dimension, _MAX_HALF_SPACES)


def room_of_body(width: int, n_features: int) -> int:
    """Return the bytes that a pickled body takes, for queries of that width."""
    dimension = width * n_features
    half_spaces = most_half_spaces(dimension) * (width + n_features + 1)
    return 8 * (dimension * (dimension + 2) + half_spaces) + _ROOM_OF_NAMES


@dataclass(frozen=True, eq=False, repr=False)
class ConvexBody:
    """An ellipsoid from certified interior rows, cut by half-spaces from certified vertex rows.

    The ellipsoid ``{t : (t - centre)^T M (t - centre) <= slack^2}`` holds the matrices whose
    log-odds agree with the certified patterns to `slack` in root mean square; its longest axes
    span the hull. Every half-space is ``<query gap^T, t> >= margin``.

    A pickled body takes the same space whatever the data: its half-spaces are padded to the
    most that there may be, and the padding is dropped on the way back.
    """

    units: Units
    centre: Array
    """(D,): least-squares solution of the equalities of minimum norm."""
    eigenvalues: Array
    """(D,): of ``M``, ascending; the first m - 1 are small."""
    eigenvectors: Array
    """(D, D): columns, in the order of the eigenvalues."""
    slack: float
    queries: Array
    """(h, q): of the half-spaces' rows."""
    gaps: Array
    """(h, d): the chosen token less another one."""
    margins: Array
    """(h,): positive."""

    @cached_property
    def normals(self) -> Array:
        """Normals of the half-spaces, (h, D)."""
        return (self.queries[:, :, None] * self.gaps[:, None, :]).reshape(len(self.gaps), len(self.centre))

    def __getstate__(self) -> dict[str, Any]:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        n_padding = max(most_half_spaces(len(self.centre)) - len(self.margins), 0)
        for name in ("queries", "gaps", "margins"):
            padding = np.zeros((n_padding, *state[name].shape[1:]))
            state[name] = np.concatenate([state[name], padding])
        return state | {"n_half_spaces": len(self.margins)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = slice(state["n_half_spaces"])
        for field in fields(self):
            value = state[field.name]
            value = value[kept] if field.name in ("queries", "gaps", "margins") else value
            object.__setattr__(self, field.name, value)

    def __repr__(self) -> str:
        return f"ConvexBody(dimension={len(self.centre)}, n_half_spaces={len(self.margins)})"

    def violation(self, vectors: Array) -> Array:
        """Return how far internal vectors ``(..., D)`` are from inside.

        The larger of the root mean square equality residual over `slack` and, for half-spaces,
        one plus the missing share of the margin. Values up to 1 are inside.
        """
        inside = self.contradiction(vectors) / self.slack
        if not len(self.margins):
            return inside
        missing = (self.margins - vectors @ self.normals.T) / self.margins
        return np.maximum(inside, 1.0 + missing.max(axis=-1))

    def contradiction(self, vectors: Array) -> Array:
        """Return the root mean square log-odds by which internal vectors ``(..., D)`` miss the equalities.

        Beyond what the equalities miss of each other, which is no vector's fault.
        """
        offsets = (vectors - self.centre) @ self.eigenvectors
        return np.asarray(np.sqrt(np.maximum(offsets**2 @ self.eigenvalues, 0.0)))

    def inside(self, vectors: Array) -> Array:
        """Return for each internal vector of ``(n, D)`` whether the body contains it.

        The same as ``violation(vectors) <= 1``, asking the half-spaces only inside the ellipsoid.
        """
        held = self.contradiction(vectors) <= self.slack
        if len(self.margins) and held.any():
            held[held] = (vectors[held] @ self.normals.T >= self.margins).all(axis=1)
        return held

    def contains(self, attention: Array, key_bias: Array | None = None) -> bool:
        """Return whether the body contains a matrix: the membership oracle.

        Parameters
        ----------
        attention : array-like of shape (d, d)
            In the units of the data.
        key_bias : array-like of shape (d,), default=None

        Returns
        -------
        bool
        """
        attention = np.asarray(attention, dtype=np.float64)
        n_features = self.units.n_features
        if attention.shape != (n_features, n_features):
            raise ValueError(f"attention must have shape {(n_features, n_features)}, got {attention.shape}.")
        bias = None if key_bias is None else np.asarray(key_bias, dtype=np.float64)[None]
        vector = self.units.attention_in(attention[None], bias).ravel()
        return bool(self.inside(vector[None])[0])

    def anchor(self) -> Array:
        """Return a point of the hull: the minimum-norm point, or the centre where that adds nothing.

        Interior rows alone have their minimum-norm least-squares point already; the convex
        program is needed where half-spaces cut, and its failure leaves the centre.
        """
        return self._anchored[0]

    @property
    def obstacle(self) -> str:
        """Why the anchor is the centre although half-spaces cut it off; empty if it is not."""
        return self._anchored[1]

    @cached_property
    def _anchored(self) -> tuple[Array, str]:
        if not len(self.margins) or self.violation(self.centre) <= 1.0:
            return self.centre, ""
        try:
            return self.minimum_norm_point(), ""
        except ConvexProgramError as error:
            logger.info("%s The centre of the ellipsoid is used instead.", error)
            return self.centre, f"{error} The centre of the ellipsoid is used instead."

    def minimum_norm_point(self) -> Array:
        """Return the point of the body nearest to zero, shape (D,), by a convex program.

        It stands in for the average attention matrix (section 4 of the paper).

        Raises
        ------
        ConvexProgramError
            If the body is empty or the solver's answer fails the check.
        """
        # The ellipsoid enters softly, as |residual|^2 / slack^2 against |t|^2 / |centre|^2: its long
        # axes, which no row determines, then go to their smallest value.
        roots = np.sqrt(np.maximum(self.eigenvalues, 0.0))
        held = roots > _NOT_HELD * max(float(roots[-1]), 1e-300)
        rows = roots[held, None] * self.eigenvectors[:, held].T
        weight = max(float(self.centre @ self.centre), 1.0) / self.slack**2
        return minimum_norm_point(
            least_squares=(rows, rows @ self.centre, weight) if held.any() else None,
            halfspaces=(self.normals, self.margins) if len(self.margins) else None,
            anchor=np.zeros(len(self.centre)),
            stage="sculpt",
        ).point
