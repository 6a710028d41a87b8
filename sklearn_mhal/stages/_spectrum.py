"""Extreme eigenvalues of the information: what the equations determine, and how well.

Formed and exact for small layers; for large ones by products with the matrix, where the smallest
eigenvalue is an iterated value and so not proved to be the smallest.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve
from scipy.sparse.linalg import LinearOperator, lobpcg

from .._forward import Array
from .._information import information
from .._linearisation import Linearisation
from .._problem import Problem, factorise

# Up to this many attention parameters the information matrix is formed and its spectrum exact.
_DENSE = 700
_LOBPCG_STEPS = 25
# An eigenvalue this far under the largest is a direction the equations leave free: products in
# double precision carry sixteen digits, and sums over rows lose a few.
_FREE = 1e-12


@dataclass(frozen=True, eq=False)
class Spectrum:
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


def spectrum_of(problem: Problem, attention: Array) -> Spectrum:
    """Return the spectrum of a problem's information at an attention."""
    state = problem.evaluate(attention)
    design = state.regression.design
    gram = np.linalg.eigvalsh(design.T @ design)
    found = _formed if attention.size <= _DENSE else _estimated
    smallest, largest, weakest, coupling = found(problem, attention)
    return Spectrum(
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
