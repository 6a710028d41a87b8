"""After the stages: what the data proves about the learned layer.

*Is it determined?* The information matrix on the attention (the Schur complement of
:mod:`sklearn_mhal._information`) is singular exactly in the directions that the equations leave
free: a head without projection, too few samples, tokens that never differ.

*Is it the only one?* If the equations hold exactly, Newton-Kantorovich on
``G(x) = J_0^+ F(x)`` gives two radii. With ``sigma`` the smallest singular value of the derivative J_0
of the equations F at the learned parameters, K a Lipschitz constant of the derivative and
``h = |F| K / sigma^2 <= 1/2``::

    solution radius    (1 - sqrt(1 - 2 h)) sigma / K     contains a solution of G
    uniqueness radius  (1 + sqrt(1 - 2 h)) sigma / K     contains no other

and a layer that satisfies the training equations exactly is a solution of G. The constants are derived
in the documentation, "Reading the certificate".
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve
from scipy.sparse.linalg import LinearOperator, lobpcg

from .._examples import Examples
from .._forward import Array
from .._information import information
from .._linearisation import Linearisation
from .._problem import Problem, factorise
from ..layer import AttentionLayer
from ._result import StageResult, timed
from .heads import Heads
from .sculpt import Sculpture

_FEW = 6
_LEAST_SAMPLES = 64
# Where these leave a direction free, more samples are asked: rows of low-rank projections count for
# fewer equations than they have numbers, and those of hard attention for hardly any.
_MORE, _MOST = 4, 96
# Up to this many attention parameters the information matrix is formed and its spectrum exact.
_DENSE = 700
_LOBPCG_STEPS = 25
# Relative squared residual that rounding leaves behind on a noise-free fit.
EXACT_RESIDUAL = 1e-16
# An eigenvalue this far under the largest is a direction the equations leave free: products in
# double precision carry sixteen digits, and sums over rows lose a few.
_FREE = 1e-12
_WEAK = 1e-3
# The projections' norm, on which the Lipschitz constant depends, is taken this share of all larger, so
# that the constant holds in a ball of this relative radius; no radius that is proved may exceed it.
_BALL = 1e-3


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
    spectrum = _spectrum(part, attention)
    while varied and spectrum.free and n_few < min(examples.n_samples, _MOST * limit):
        n_few = min(_MORE * n_few, _MOST * limit)
        part = examples.first(n_few).problem()
        spectrum = _spectrum(part, attention)
    locally = varied and not spectrum.free
    state = part.evaluate(attention)
    projection = state.regression.projection
    powers = _head_powers(part, state.patterns, projection)
    weak = tuple(int(i) for i in np.flatnonzero(powers < _WEAK * powers.max(initial=0.0)))
    exact = residual <= EXACT_RESIDUAL
    radii = (np.inf, 0.0)
    if exact and locally:
        radii = _radii(part, attention, projection, spectrum)
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


@dataclass(frozen=True, eq=False)
class _Spectrum:
    """Extreme eigenvalues of the information, sums over the equations of a problem."""

    smallest: float
    largest: float
    """Of S, on the attention."""
    weakest: Array
    """Unit vector that belongs to `smallest`."""
    coupling: float
    """``|G^-1 B^T|``, how far the projections follow the attention; infinite if not formed."""
    gram_smallest: float
    gram_largest: float
    """Of G, on the projections."""
    exact: bool
    """Whether S was formed; else `smallest` is an upper estimate."""

    @property
    def free(self) -> bool:
        """Whether some direction of the parameters is not determined."""
        return self.smallest <= _FREE * self.largest or self.gram_smallest <= _FREE * self.gram_largest


def _spectrum(problem: Problem, attention: Array) -> _Spectrum:
    state = problem.evaluate(attention)
    design = state.regression.design
    gram = np.linalg.eigvalsh(design.T @ design)
    found = _formed if attention.size <= _DENSE else _estimated
    smallest, largest, weakest, coupling = found(problem, attention)
    return _Spectrum(
        smallest=max(smallest, 0.0),
        largest=max(largest, 0.0),
        weakest=weakest,
        coupling=coupling,
        gram_smallest=max(float(gram[0]), 0.0),
        gram_largest=float(gram[-1]),
        exact=attention.size <= _DENSE,
    )


def _formed(problem: Problem, attention: Array) -> tuple[float, float, Array, float]:
    """Return the extreme eigenvalues of S, the smallest one's vector, and ``|G^-1 B^T|``."""
    info = information(problem, attention, problem.evaluate(attention).regression.projection)
    schur = info.schur()
    values = np.linalg.eigvalsh(schur)
    smallest, largest = float(values[0]), float(values[-1])
    # Two steps of inverse iteration, well shifted, from a fixed start.
    shift = max(1e-3 * abs(smallest), 1e-14 * largest, 1e-300) - smallest
    factor = factorise(schur + shift * np.eye(len(schur)))
    vector = np.random.default_rng(0).standard_normal(len(schur))
    for _ in range(2):
        vector = cho_solve((factor, True), vector, check_finite=False)
        # A matrix of zeros gives numbers whose squares would overflow.
        vector /= np.abs(vector).max()
    follow = cho_solve(
        (factorise(info.gram.copy()), True),
        info.cross.transpose(1, 0, 2).reshape(len(info.gram), -1),
        check_finite=False,
    )
    return smallest, largest, vector / np.linalg.norm(vector), float(np.linalg.norm(follow))


def _estimated(problem: Problem, attention: Array) -> tuple[float, float, Array, float]:
    """Return the same by products with S alone, the coupling left out."""
    state = problem.evaluate(attention)
    linear = Linearisation(problem, state)
    left = np.linalg.inv(problem.query_moment)
    right = np.linalg.inv(linear.block + 1e-10 * linear.scale * np.eye(len(linear.block)))
    shape = attention.shape

    def on_columns(function):  # type: ignore[no-untyped-def]
        def apply(columns: Array) -> Array:
            columns = columns.reshape(attention.size, -1)
            return np.stack([function(column.reshape(shape)).ravel() for column in columns.T], axis=1)

        return apply

    size = (attention.size, attention.size)
    product = on_columns(linear.exact_product)
    inverse = on_columns(lambda vector: left @ vector @ right)
    operator = LinearOperator(size, matvec=product, matmat=product, dtype=np.float64)
    preconditioner = LinearOperator(size, matvec=inverse, matmat=inverse, dtype=np.float64)
    # Fixed start vectors: the estimate is part of the result and must not vary.
    start = np.random.default_rng(0).standard_normal((attention.size, 2))
    with warnings.catch_warnings():
        # Unconverged vectors still bound the smallest eigenvalue from above.
        warnings.simplefilter("ignore", UserWarning)
        low, vectors = lobpcg(
            operator, inverse(start), M=preconditioner, largest=False, maxiter=_LOBPCG_STEPS
        )
    lowest = int(np.argmin(low))
    ritz = np.real(vectors[:, lowest])
    ritz /= np.linalg.norm(ritz)
    # Some eigenvalue lies within the residual of a Ritz value; that it is the smallest is likely, not proved.
    defect = float(np.linalg.norm(operator.matvec(ritz).ravel() - low[lowest] * ritz))
    smallest = float(low[lowest]) - defect
    smallest = smallest if smallest > 0.0 else 0.5 * max(float(low[lowest]), 0.0)
    vector = start[:, 0]
    high = 0.0
    for _ in range(8):
        vector = operator.matvec(vector / np.linalg.norm(vector)).ravel()
        high = float(np.linalg.norm(vector))
    return smallest, high, ritz, np.inf


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


def _radii(problem: Problem, attention: Array, projection: Array, spectrum: _Spectrum) -> tuple[float, float]:
    """Return the relative solution and uniqueness radii; see the module's docstring."""
    sigma, lipschitz, scale = _constants(problem, attention, projection, spectrum)
    misfit = np.sqrt(problem.evaluate(attention).error * problem.label_power)
    rounding = np.finfo(np.float64).eps * np.sqrt(problem.label_power) * np.sqrt(len(projection))
    h = (misfit + rounding) * lipschitz / sigma**2
    # Tokens that never differ give a constant of zero: then nothing is said of the attention.
    if h > 0.5 or not np.isfinite(h) or not lipschitz > 0.0:
        return np.inf, 0.0
    root = np.sqrt(1.0 - 2.0 * h)
    ratio = sigma / lipschitz / scale
    # 1 - sqrt(1 - 2 h) loses all digits for small h; this is the same number.
    solution = float(2.0 * h / (1.0 + root) * ratio)
    return (solution, float(min((1.0 + root) * ratio, _BALL))) if solution < _BALL else (np.inf, 0.0)


def _constants(
    problem: Problem, attention: Array, projection: Array, spectrum: _Spectrum
) -> tuple[float, float, float]:
    """Return bounds on the smallest singular value and the Lipschitz constant, and the parameters' norm."""
    rows = problem.rows
    coupling = spectrum.coupling
    if not np.isfinite(coupling):
        coupling = np.sqrt(_attention_norm(problem, attention, projection) / spectrum.gram_smallest)
    # |inverse of the joint matrix| <= |S^-1| (1 + |G^-1 B^T|^2) + |G^-1|: block elimination.
    sigma = ((1.0 + coupling**2) / spectrum.smallest + 1.0 / spectrum.gram_smallest) ** -0.5
    spread = np.linalg.norm(rows.tokens - rows.tokens.mean(axis=1, keepdims=True), axis=2).max(axis=1)
    queries = np.linalg.norm(rows.queries, axis=1).reshape(rows.n_samples, -1).max(axis=1)
    norms = np.linalg.norm(projection.reshape(-1, rows.n_features, projection.shape[1]), 2, axis=(1, 2))
    scale = float(np.sqrt(np.vdot(attention, attention) + np.vdot(projection, projection)))
    largest_norm = float(norms.max()) + _BALL * scale
    weights = 1.0 if rows.root_weights is None else rows.root_weights
    second = weights * (2.0 * spread**3 * queries**2 * largest_norm + spread**2 * queries)
    return sigma, float(np.sqrt(rows.rows_per_sample) * np.linalg.norm(second)), scale


def _attention_norm(problem: Problem, attention: Array, projection: Array) -> float:
    """Return a bound on the largest eigenvalue of ``J^T J = sum q q^T (x) C C^T``.

    No eigenvalue exceeds the trace, ``sum |q|^2 |C|^2`` over rows, with ``C_i = Cov_{p_i}(x) W_i``.
    """
    rows = problem.rows
    patterns = rows.patterns(attention)
    n_heads = attention.shape[1] // rows.n_features
    # |Cov_p(x)| is at most the p-weighted mean square distance from the sample's mean token.
    distances = np.square(rows.tokens - rows.tokens.mean(axis=1, keepdims=True)).sum(axis=2)
    scatter = (patterns @ distances[:, :, None])[:, :, 0].reshape(rows.n_samples, rows.n_queries, n_heads)
    powers = np.square(projection.reshape(n_heads, -1)).sum(axis=1)
    squares = (np.square(scatter) * powers).sum(axis=2)
    lengths = np.square(rows.queries).sum(axis=1).reshape(rows.n_samples, rows.n_queries)
    weights = 1.0 if rows.root_weights is None else np.square(rows.root_weights)[:, None]
    return float((lengths * squares * weights).sum())


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
