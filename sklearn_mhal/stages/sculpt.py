"""Stage 2: sculpt the affine hull of the attention matrices out of certified rows.

Section 3 of the paper. Given the sum of the projections, every row gets the single pattern
that fits it best (:mod:`._agreement`). A row is *certified* if the fit leaves almost no residual
and the pattern lies in the simplex: then all heads share the pattern. Its log-odds

    <Theta_i, q (x_b - x_b')^T> = log(p_b / p_b')        (interior: every p_b >= interior)
    <Theta_i, q (x_b - x_b')^T> >= margin                (vertex: p near one token b)

hold for every head at once, so they hold on the whole affine hull. Interior rows make an
ellipsoid that is long only along the hull; vertex rows cut it by half-spaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array
from ._agreement import RowFit, Rows, fit_patterns, load_rows
from ._body import ConvexBody, most_half_spaces
from ._result import StageResult, timed

_OUTSIDE = 0.05
# The accuracy that log-odds have at best; keeps the body of an exactly solved single head fat
# enough that rounding does not push its own matrix out.
_SLACK_FLOOR = 1e-7
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
    fraction: float = 0.02,
    interior: float = 0.02,
    vertex: float = 0.02,
    margin: float = 1.0,
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
        Largest fraction of the eligible rows to certify, the best fitting first. Smaller
        certifies less and more surely; at least six equalities an unknown are kept.
    interior : float in (0, 1/k)
        Smallest pattern entry of an interior row. Log-odds amplify errors by its inverse.
    vertex : float in (0, 0.5)
        Largest total weight off the chosen token in a vertex row.
    margin : float > 0
        Gap in log-odds that a vertex row promises for every head. At most
        ``log((1 - vertex) / vertex)``; smaller is safer.
    tolerance : float > 0
        Largest residual of a certified row relative to the label power. No row above it is
        ever certified.
    max_heads : int
        How many eigenvalues to keep, and the largest count to propose.

    Returns
    -------
    Sculpture
    """
    n_tokens, n_outputs = examples.n_tokens, examples.n_outputs
    nothing = dict(
        body=None,
        n_interior=0,
        n_vertex=0,
        n_rows=0,
        eigenvalues=np.empty(0),
        n_heads=None,
        average=None,
        n_samples=examples.n_samples,
    )
    if examples.readout == "mean" or n_tokens < 2 or n_outputs <= n_tokens - 1:
        reason = (
            "averaged rows mix the patterns of all queries"
            if examples.readout == "mean"
            else "a single token has no pattern"
            if n_tokens < 2
            else f"n_outputs={n_outputs} must exceed n_tokens - 1 = {n_tokens - 1}"
        )
        return Sculpture(message=f"no row can be certified: {reason}", **nothing)
    rows = load_rows(examples)
    fit = fit_patterns(rows, total)
    inner, outer = _certify(
        fit, fraction=fraction, interior=interior, vertex=vertex, tolerance=tolerance,
        least=int(np.ceil(6 * examples.query_width * examples.n_features / (n_tokens - 1))),
    )
    n_rows = fit.error.size
    if not inner.any() and not outer.any():
        best = float(fit.error.min())
        message = f"no row certified: the best residual {best:.1e} exceeds tolerance={tolerance:g}"
        return Sculpture(message=message, **{**nothing, "n_rows": n_rows})
    body = _build_body(examples, rows, fit, inner, outer, margin=margin)
    n_heads, gap = _count(body.eigenvalues, max_heads) if inner.any() else (None, 1.0)
    if fit.error[inner].max(initial=np.inf if not inner.any() else 0.0) < _ONE_PATTERN:
        n_heads, gap = 1, np.inf
    average = body.centre
    counted = "" if n_heads is None else f"; the spectrum proposes {n_heads} heads (gap {gap:.1f})"
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
            f"{counted}"
        ),
    )


def _certify(
    fit: RowFit, *, fraction: float, interior: float, vertex: float, tolerance: float, least: int
) -> tuple[Array, Array]:
    """Return the masks of the certified interior and vertex rows."""
    smallest, largest = fit.patterns.min(axis=2), fit.patterns.max(axis=2)
    eligible = fit.determined[:, None] & (smallest > -_OUTSIDE)
    masks = []
    for kind in (eligible & (smallest >= interior), eligible & (largest >= 1.0 - vertex)):
        errors = fit.error[kind]
        n_kept = min(len(errors), max(int(fraction * len(errors)), least))
        if n_kept == 0:
            masks.append(np.zeros_like(kind))
            continue
        limit = min(tolerance, float(np.partition(errors, n_kept - 1)[n_kept - 1]))
        masks.append(kind & (fit.error <= limit))
    return masks[0], masks[1]


def _build_body(
    examples: Examples, rows: Rows, fit: RowFit, inner: Array, outer: Array, *, margin: float
) -> ConvexBody:
    width, d = examples.query_width, examples.n_features
    moment, right, power = np.zeros((width * d,) * 2), np.zeros(width * d), 0.0
    if inner.any():
        samples, queries_at = np.nonzero(inner)
        patterns, tokens = fit.patterns[samples, queries_at], rows.tokens[samples]
        weights = rows.weights[samples] / rows.weights[samples].sum()
        queries = _with_constant(rows.queries[samples, queries_at], width)
        log_odds = np.log(patterns)
        # Centred by the pattern itself, so that a token of weight p_b counts p_b times: the
        # log-odds of rare tokens are the least certain.
        centred = tokens - np.einsum("rb,rbd->rd", patterns, tokens)[:, None]
        heights = log_odds - np.einsum("rb,rb->r", patterns, log_odds)[:, None]
        spread = np.einsum("rb,rbd,rbe->rde", patterns, centred, centred, optimize=True)
        pairs = np.einsum("r,rp,rs->rps", weights, queries, queries).reshape(len(samples), -1)
        moment = pairs.T @ spread.reshape(len(samples), -1)
        moment = moment.reshape(width, width, d, d).transpose(0, 2, 1, 3).reshape(width * d, -1)
        right = np.einsum("r,rp,rb,rb,rbd->pd", weights, queries, patterns, heights, centred, optimize=True).ravel()
        power = float(np.einsum("r,rb,rb->", weights, patterns, heights**2))
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, 0.0)
    held = values > 1e-10 * max(float(values[-1]), 1e-300)
    coordinates = np.where(held, (vectors.T @ right) / np.where(held, values, 1.0), 0.0)
    centre = vectors @ coordinates
    unexplained = max(power - float(coordinates @ (vectors.T @ right)), 0.0)
    queries_out, gaps = _half_spaces(rows, fit, outer, width)
    return ConvexBody(
        units=examples.units,
        centre=centre,
        eigenvalues=values,
        eigenvectors=vectors,
        # The certified patterns contradict each other by the unexplained part; a matrix that
        # fits them three times as badly as the best is not told apart from it.
        slack=max(3.0 * float(np.sqrt(unexplained)), _SLACK_FLOOR * max(1.0, float(np.sqrt(power)))),
        queries=queries_out,
        gaps=gaps,
        margins=np.full(len(gaps), margin),
    )


def _half_spaces(rows: Rows, fit: RowFit, outer: Array, width: int) -> tuple[Array, Array]:
    """Return ``q`` and ``x_b - x_b'`` of the vertex rows' normals ``q (x_b - x_b')^T``, the surest first."""
    samples, queries_at = np.nonzero(outer)
    n_tokens, d = rows.tokens.shape[1:]
    order = np.argsort(fit.error[samples, queries_at], kind="stable")
    order = order[: most_half_spaces(width * d) // (n_tokens - 1)]
    samples, queries_at = samples[order], queries_at[order]
    chosen = fit.patterns[samples, queries_at].argmax(axis=1)
    gaps = (rows.tokens[samples, chosen][:, None] - rows.tokens[samples]).reshape(-1, d)
    queries = _with_constant(rows.queries[samples, queries_at], width)
    queries = np.repeat(queries, n_tokens, axis=0)
    # A token equal to the chosen one, and so itself, gives no gap and promises nothing.
    promised = (gaps != 0.0).any(axis=1) & (queries != 0.0).any(axis=1)
    return queries[promised], gaps[promised]


def _with_constant(queries: Array, width: int) -> Array:
    if queries.shape[1] == width:
        return queries
    return np.concatenate([queries, np.ones((len(queries), 1))], axis=1)


def _count(eigenvalues: Array, max_heads: int) -> tuple[int | None, float]:
    """Return the count that the largest relative gap proposes, and the gap."""
    leading = eigenvalues[: max_heads + 1]
    if len(leading) < 2:
        return None, 1.0
    ratios = leading[1:] / np.maximum(leading[:-1], max(1e-12 * float(leading[-1]), 1e-300))
    at = int(np.argmax(ratios))
    gap = float(ratios[at])
    return (at + 2 if gap >= _CLEAR_GAP else None), gap
