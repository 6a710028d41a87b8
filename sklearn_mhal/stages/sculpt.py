"""Stage 2: sculpt the affine hull of the attention matrices out of certified rows.

Section 3 of the paper. Given the sum of the projections, every row gets the single pattern
that fits it best (:mod:`._agreement`). A row is *certified* if the fit leaves almost no residual
and the pattern lies in the simplex: then all heads share the pattern. Its log-odds::

    <Theta_i, q (x_b - x_b')^T> = log(p_b / p_b')        (interior: every p_b >= interior)
    <Theta_i, q (x_b - x_b')^T> >= log(p_b / u_b')       (vertex: p near one token b)

hold for every head at once, the first on their whole affine hull, the second on their convex
hull. Here ``u_b'`` is the most that any head can have given to token b', were the whole residual
due to it. Interior rows make an ellipsoid that is long only along the hull; vertex rows cut it
by half-spaces. The harder the attention the fewer rows are interior, and the closer the
half-spaces come to carrying everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .._examples import Examples
from .._forward import Array
from ._agreement import RowFit, Rows, fit_patterns, load_rows, no_agreement
from ._body import ConvexBody, room_of_body
from ._constraints import half_spaces, interior_ellipsoid
from ._result import StageResult, timed

_OUTSIDE = 0.05
_EQUATIONS_PER_UNKNOWN = 12
# Heads lie on both sides of the point where ellipsoid and half-spaces meet: in a trial at a scale
# of 16 up to 2.2 times as far from the ellipsoid's centre as that point.
_WIDER, _WIDENINGS, _TOUCHING = 2.5, 3, 1e-6
# An eigenvalue ratio below this does not tell hull from rest (a trial saw 1.1 to 3.2 where the
# count could not be read off, 1.9 to 19 where it could).
_CLEAR_GAP = 2.0
# Rows that a single pattern explains this well (relative squared residual) have a single head.
_ONE_PATTERN = 1e-18


@dataclass(frozen=True, kw_only=True, eq=False)
class Sculpture(StageResult):
    """The body and what it rests on."""

    body: ConvexBody | None
    """None where fewer than one row was certified."""
    n_interior: int
    n_vertex: int
    n_rows: int
    """Certified rows of either kind, and rows looked at."""
    eigenvalues: Array
    """The smallest eigenvalues of the equality moments, ascending."""
    n_heads: int | None
    """The number of heads that the largest gap of the eigenvalues proposes; None if no gap is clear."""
    average: Array | None
    """The body's minimum-norm point in the units of the data, shape (d, d)."""


@timed
def sculpt(
    examples: Examples,
    total: Array,
    *,
    fraction: float = 0.05,
    interior: float = 0.02,
    vertex: float = 0.02,
    margin: float = 2.0,
    tolerance: float = 0.02,
    max_heads: int = 8,
) -> Sculpture:
    """Certify rows and build the convex body around the attention matrices.

    Parameters
    ----------
    examples : Examples
    total : ndarray of shape (d or d + 1, d_out)
        The sum of the projections, internal units, intercept row included.
    fraction : float in (0, 1]
        Fraction of the interior rows under `tolerance` to certify, the best fitting first. Smaller
        certifies less and more surely; twelve equalities an unknown are kept if there are as many.
        Rows are weighted by their sureness, so within 0.02 to 0.2 it matters little.
    interior : float in (0, 1/k)
        Smallest pattern entry of an interior row. Log-odds amplify errors by its inverse.
    vertex : float in (0, 0.5)
        Largest total weight off the chosen token in a vertex row.
    margin : float > 0
        Log-odds taken off what a vertex row measures before it is promised for every head;
        larger is safer. With 2 no promise was broken on generic heads (with 1, one in a thousand);
        heads whose projections are smaller than the others' need the logarithm of that ratio more.
    tolerance : float > 0
        Largest residual of a certified row relative to the label power. No row above it is
        ever certified.
    max_heads : int
        How many eigenvalues to keep, and the largest count to propose.

    Returns
    -------
    Sculpture
    """
    n_tokens = examples.n_tokens
    obstacle = no_agreement(examples)
    if obstacle is not None:
        return _nothing(examples, f"no row can be certified: {obstacle}", 0)
    rows = load_rows(examples)
    fit = fit_patterns(rows, total)
    n_equations = _EQUATIONS_PER_UNKNOWN * examples.query_width * examples.n_features
    least = -(-n_equations // (n_tokens - 1))
    inner, outer = _certify(
        fit, fraction=fraction, interior=interior, vertex=vertex, tolerance=tolerance, least=least
    )
    n_rows = fit.error.size
    if not inner.any() and not outer.any():
        best = float(fit.error.min())
        message = f"no row certified: the best residual {best:.1e} exceeds tolerance={tolerance:g}"
        room = room_of_body(examples.query_width, examples.n_features)
        room += 8 * (max_heads + 1 + examples.units.n_features**2)
        return _nothing(examples, message, n_rows, room)
    body = _consistent(_build_body(examples, rows, fit, inner, outer, margin=margin))
    n_heads, gap = _count(body.eigenvalues, max_heads) if inner.any() else (None, 1.0)
    if fit.error[inner].max(initial=np.inf if not inner.any() else 0.0) < _ONE_PATTERN:
        n_heads, gap = 1, np.inf
    average = body.anchor()
    counted = "" if n_heads is None else f"; the spectrum proposes {n_heads} head(s) (gap {gap:.1f})"
    return Sculpture(
        body=body,
        n_interior=int(inner.sum()),
        n_vertex=int(outer.sum()),
        n_rows=n_rows,
        eigenvalues=body.eigenvalues[: max_heads + 1],
        n_heads=n_heads,
        average=examples.units.attention_out(average.reshape(-1, examples.n_features))[0][0],
        n_samples=examples.n_samples,
        message=(
            f"certified {int(inner.sum())} interior and {int(outer.sum())} vertex rows of {n_rows}"
            f"{counted}{'; ' if body.obstacle else ''}{body.obstacle}"
        ),
    )


def _nothing(examples: Examples, message: str, n_rows: int, room: int = 0) -> Sculpture:
    """Return the result that certifies nothing and says why."""
    return Sculpture(
        body=None,
        n_interior=0,
        n_vertex=0,
        n_rows=n_rows,
        eigenvalues=np.empty(0),
        n_heads=None,
        average=None,
        n_samples=examples.n_samples,
        message=message,
        room=room,
    )


def _certify(
    fit: RowFit, *, fraction: float, interior: float, vertex: float, tolerance: float, least: int
) -> tuple[Array, Array]:
    """Return the masks of the certified interior and vertex rows.

    Interior rows are equalities, so only the best fitting are kept; a vertex row's residual
    is part of what it promises.
    """
    smallest, largest = fit.patterns.min(axis=2), fit.patterns.max(axis=2)
    eligible = fit.determined[:, None] & (smallest > -_OUTSIDE) & (fit.error <= tolerance)
    inner = eligible & (smallest >= interior)
    errors = fit.error[inner]
    n_kept = min(len(errors), max(int(fraction * len(errors)), least))
    if n_kept < len(errors):
        inner &= fit.error <= np.partition(errors, n_kept - 1)[n_kept - 1]
    return inner, eligible & (largest >= 1.0 - vertex)


def _build_body(
    examples: Examples, rows: Rows, fit: RowFit, inner: Array, outer: Array, *, margin: float
) -> ConvexBody:
    ellipsoid = interior_ellipsoid(rows, fit, inner, examples.query_width)
    queries, gaps, margins = half_spaces(rows, fit, outer, examples.query_width, margin)
    return ConvexBody(
        units=examples.units,
        centre=ellipsoid.centre,
        eigenvalues=ellipsoid.eigenvalues,
        eigenvectors=ellipsoid.eigenvectors,
        slack=ellipsoid.slack,
        queries=queries,
        gaps=gaps,
        margins=margins,
    )


def _consistent(body: ConvexBody) -> ConvexBody:
    """Widen an ellipsoid that the half-spaces contradict until they meet.

    Under hard attention rows look interior by chance, more often than heads are soft and agree.
    They do not show in contradicting each other, as they were chosen for looking alike; the
    vertex rows, whose promises hold, tell how far off they are.
    """
    for _ in range(_WIDENINGS):
        contradiction = float(body.contradiction(body.anchor()))
        if contradiction <= body.slack * (1.0 + _TOUCHING):
            break
        body = replace(body, slack=_WIDER * contradiction)
    return body


def _count(eigenvalues: Array, max_heads: int) -> tuple[int | None, float]:
    """Return the count that the largest relative gap proposes, and the gap."""
    leading = eigenvalues[: max_heads + 1]
    if len(leading) < 2:
        return None, 1.0
    ratios = leading[1:] / np.maximum(leading[:-1], max(1e-12 * float(leading[-1]), 1e-300))
    at = int(np.argmax(ratios))
    gap = float(ratios[at])
    return (at + 2 if gap >= _CLEAR_GAP else None), gap
