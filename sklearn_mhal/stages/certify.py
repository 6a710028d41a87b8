"""After the stages: what the data proves about the learned layer.

*Is it determined?* The information matrix on the attention (the Schur complement of
:mod:`sklearn_mhal._information`) is singular exactly in the directions that the equations leave
free: a head without projection, too few samples, tokens that never differ.

*Is it the only one?* If the equations hold exactly, a theorem of Newton and Kantorovich gives two radii
around the learned parameters: within the first there is a solution, within the second no other. How they
come about is in the documentation, "Reading the certificate".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array
from .._problem import Problem
from ..layer import AttentionLayer
from ._radii import radii_of
from ._result import StageResult, timed
from ._spectrum import spectrum_of
from .heads import Heads
from .sculpt import Sculpture

_FEW = 6
_LEAST_SAMPLES = 64
# Where these leave a direction free, more samples are asked: rows of low-rank projections count for
# fewer equations than they have numbers, and those of hard attention for hardly any.
_MORE, _MOST = 4, 96
# Relative squared residual that rounding leaves behind on a noise-free fit.
EXACT_RESIDUAL = 1e-16
_WEAK = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificate(StageResult):
    """What is certain about the learned layer; `message` is the verdict in one sentence."""

    identified: bool
    """The equations hold exactly and determine every parameter."""
    locally_identified: bool
    """The information matrix has full rank: no direction is free at the solution."""
    held_out_error: float
    """Relative squared error on held-out samples, before the polish."""
    residual: float
    """Relative squared residual on all samples, after it."""
    n_equations: int
    n_unknowns: int
    smallest_eigenvalue: float
    largest_eigenvalue: float
    """Of the information on the attention, a mean over rows, internal units."""
    spectrum_is_exact: bool
    """Whether the matrix was formed; else the smallest eigenvalue is an upper estimate."""
    projection_eigenvalue_ratio: float
    """Smallest over largest eigenvalue of the pooled tokens' moments: 0 if heads coincide."""
    weakest_direction: Array
    """(m,): share of each head in the least determined direction of the attention; sums to 1."""
    head_powers: Array
    """(m,): power of each head's centred output relative to the labels'."""
    weak_heads: tuple[int, ...]
    """Heads whose power is under a thousandth of the strongest's."""
    certified_fraction: float
    """Fraction of the rows looked at that sculpting certified."""
    head_distances: Array
    """(m,): how far outside the convex body each head is, 0 if inside; NaN without a body."""
    solution_radius: float
    """Relative to the norm of all matrices in internal units; infinite if nothing is proved."""
    uniqueness_radius: float
    """Likewise: no second solution lies inside. At most a thousandth; zero if nothing is proved."""

    @property
    def verdict(self) -> str:
        """The certificate in one sentence."""
        return self.message


@timed
def certify(
    examples: Examples,
    layer: AttentionLayer,
    attention: Array,
    *,
    residual: float,
    heads: Heads,
    sculpture: Sculpture,
) -> Certificate:
    """Collect what the data proves about a layer.

    Parameters
    ----------
    examples : Examples
    layer : AttentionLayer
        The learned layer, in the units of the data.
    attention : ndarray of shape (q, m * d)
        Its attention in internal units.
    residual : float
        Relative squared residual on all samples.
    heads : Heads
    sculpture : Sculpture

    Returns
    -------
    Certificate
    """
    n_heads = layer.n_heads
    n_equations = examples.n_samples * examples.equations_per_sample
    n_unknowns = examples.n_unknowns(n_heads)
    varied = (
        examples.n_tokens > 1
        and examples.units.width == examples.units.n_features
        and n_equations >= n_unknowns
    )
    limit = examples.information_limit(n_heads)
    n_few = max(_FEW * limit, _LEAST_SAMPLES)
    part = examples.first(n_few).problem()
    spectrum = spectrum_of(part, attention)
    while varied and spectrum.free and n_few < min(examples.n_samples, _MOST * limit):
        n_few = min(_MORE * n_few, _MOST * limit)
        part = examples.first(n_few).problem()
        spectrum = spectrum_of(part, attention)
    locally = varied and not spectrum.free
    state = part.evaluate(attention)
    projection = state.regression.projection
    powers = _head_powers(part, state.patterns, projection)
    weak = tuple(int(i) for i in np.flatnonzero(powers < _WEAK * powers.max(initial=0.0)))
    exact = residual <= EXACT_RESIDUAL
    radii = (np.inf, 0.0)
    if exact and locally:
        radii = radii_of(part, attention, projection, spectrum)
    return Certificate(
        identified=bool(exact and locally),
        locally_identified=bool(locally),
        held_out_error=heads.held_out_error,
        residual=residual,
        n_equations=n_equations,
        n_unknowns=n_unknowns,
        smallest_eigenvalue=spectrum.smallest / part.rows.n_rows,
        largest_eigenvalue=spectrum.largest / part.rows.n_rows,
        spectrum_is_exact=spectrum.exact,
        projection_eigenvalue_ratio=spectrum.gram_smallest / max(spectrum.gram_largest, 1e-300),
        weakest_direction=_shares(spectrum.weakest, attention.shape, n_heads),
        head_powers=powers,
        weak_heads=weak,
        certified_fraction=(sculpture.n_interior + sculpture.n_vertex) / max(sculpture.n_rows, 1),
        head_distances=_distances(sculpture, attention, examples.n_features),
        solution_radius=radii[0],
        uniqueness_radius=radii[1],
        n_samples=part.rows.n_samples,
        message=_verdict(
            examples, exact, locally, residual, radii[0], spectrum.exact, n_equations, n_unknowns, weak
        ),
    )


def _shares(vector: Array, shape: tuple[int, ...], n_heads: int) -> Array:
    squares = np.square(vector).reshape(shape[0], n_heads, -1).sum(axis=(0, 2))
    return np.asarray(squares / max(float(squares.sum()), 1e-300))


def _head_powers(problem: Problem, patterns: Array, projection: Array) -> Array:
    d = problem.rows.n_features
    pooled = problem.rows.pooled(patterns)
    pooled = pooled - pooled.mean(axis=0)
    blocks = range(0, len(projection), d)
    powers = [np.sum((pooled[:, at : at + d] @ projection[at : at + d]) ** 2) for at in blocks]
    return np.array(powers) / problem.label_power


def _distances(sculpture: Sculpture, attention: Array, n_features: int) -> Array:
    n_heads = attention.shape[1] // n_features
    if sculpture.body is None:
        return np.full(n_heads, np.nan)
    vectors = attention.reshape(-1, n_heads, n_features).transpose(1, 0, 2).reshape(n_heads, -1)
    return np.maximum(sculpture.body.violation(vectors) - 1.0, 0.0)


def _verdict(
    examples: Examples,
    exact: bool,
    locally: bool,
    residual: float,
    radius: float,
    proved: bool,
    n_equations: int,
    n_unknowns: int,
    weak: tuple[int, ...],
) -> str:
    if examples.n_tokens == 1:
        return "not identified: with one token a sample only the sum of the projections is determined"
    if n_equations < n_unknowns:
        return f"not identified: {n_equations} equations are fewer than {n_unknowns} unknowns"
    note = f"; {'head' if len(weak) == 1 else 'heads'} {', '.join(map(str, weak))} weak" if weak else ""
    if not locally:
        return (
            "not identified: some direction of the parameters is free (a head without projection, "
            "coinciding heads, tokens that do not vary, or patterns all of which are hard)" + note
        )
    if not exact:
        return (
            f"not certain: {residual:.1e} of the label power is left, noise or misfit, which one fit "
            "cannot tell apart; parameters are locally determined" + note
        )
    proof = (
        f"; exactly one solution lies within {radius:.1e} of it, relatively"
        + ("" if proved else ", if the estimated spectrum is right")
        if np.isfinite(radius)
        else "; uniqueness nearby is not proved"
    )
    return f"identified: all equations hold to rounding and determine every parameter{proof}{note}"
