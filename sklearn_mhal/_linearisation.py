"""One step of the solver: products with the Gauss-Newton matrix, its preconditioner, its solution.

With ``Z`` an orthonormal basis of the design's columns, Kaufman's Jacobian is
``J v = -(I - Z Z^T) (dD[v] W)``, and a step solves ``(J^T J + damping) v = -J^T r``: by conjugate
gradients, preconditioned with the Kronecker product ``mean(q q^T) (x) mean(C C^T)``, where ``C``
stacks the ``C_i = Cov_{p_i}(x) W_i`` (the exact expectation of ``J^T J`` when queries and patterns
are independent), or directly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.linalg import LinAlgError
from scipy.linalg import cho_factor, cho_solve

from ._forward import Array, TokenRows
from ._information import information
from ._problem import Problem, State
from ._shares import Share, normal_product
from ._threads import in_parts, sum_in_parts

_BLOCK_OVERSAMPLING = 16
_SUBSPACE_NUMBERS = 2_000_000
_NEARLY_EXACT = 1e-5
# A matrix of this order is formed and factorised in the time of a few hundred products.
_LARGEST_MATRIX = 1200
_FORMED_NUMBERS = 20_000_000
_SINGULAR = 1e-15
# Numbers whose products single precision still holds.
_SINGLE_LIMIT = 1e15
# Derivatives below this share of the labels (squared) are rounding.
_SATURATED = 1e-16


class Linearisation:
    """The normal equations of one step: products, gradient and preconditioner."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem, self.state = problem, state
        parts = problem.rows.shares(state.attention.shape[1])
        # Once, not by every thread that finds it missing.
        _ = state.regression.inverse_factor
        self.shares = in_parts(self._share, parts)
        residual = state.regression.residual
        self.gradient: Array = sum_in_parts(
            lambda pair: pair[0].gradient(residual[problem.rows.rows_of(pair[1])]),
            list(zip(self.shares, parts, strict=True)),
        )
        if problem.attention_ridge:
            self.gradient -= problem.attention_ridge * state.attention
        self.block = self._head_block(parts)
        self.fast = in_parts(
            lambda pair: pair[0].single(problem.single_rows.between(pair[1])),
            list(zip(self.shares, parts, strict=True)),
        )
        self._matrix: Array | None = None
        # Where every row is saturated nothing pulls, and steps must not grow for that.
        self.scale = max(float(np.trace(self.block)) / len(self.block), _SATURATED * problem.label_power)

    def _share(self, part: slice) -> Share:
        """Return what products read of some samples."""
        rows, regression = self.problem.rows.between(part), self.state.regression
        values = rows.values(regression.projection)
        return Share(
            rows=rows,
            patterns=self.state.patterns[part],
            values=values,
            transposed=TokenRows.transposed(values),
            basis=regression.orthonormal(self.problem.rows.rows_of(part)),
        )

    def _head_block(self, parts: list[slice]) -> Array:
        """``sum over rows of C C^T``, every sample seen through as many outputs as are needed.

        All samples, because under hard attention a few soft rows carry almost everything;
        not all outputs, because the sum only has to be well conditioned.
        """
        n_queries, n_outputs = len(self.problem.rows.queries), self.problem.labels.shape[1]
        size = len(self.state.regression.projection)
        n_seen = int(np.clip(round(_BLOCK_OVERSAMPLING * size / n_queries), 1, n_outputs))
        block: Array = sum_in_parts(
            lambda pair: pair[0].head_block(n_seen, pair[1].start),
            list(zip(self.shares, parts, strict=True)),
        )
        return block

    def product(self, direction: Array) -> Array:
        """Return ``J^T J`` times a direction, in single precision."""
        # Where all rows are saturated directions are long beyond what single precision holds.
        unit = max(float(np.abs(direction).max(initial=0.0)), 1e-300)
        return unit * normal_product(self.fast, (direction / unit).astype(np.float32)).astype(np.float64)

    def exact_product(self, direction: Array) -> Array:
        """Return ``J^T J`` times a direction, in double precision."""
        return normal_product(self.shares, direction)

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

    @property
    def direct(self) -> bool:
        """Whether the matrix is small enough to be formed."""
        rows, size = self.problem.rows, len(self.block)
        return self.gradient.size <= _LARGEST_MATRIX and len(rows.queries) * size**2 <= _FORMED_NUMBERS

    def direct_step(self, damping: float) -> tuple[Array, float]:
        """Solve for a step by a factorisation; return it and the predicted decrease of the loss."""
        problem = self.problem
        if self._matrix is None:
            formed = information(problem, self.state.attention, self.state.regression.projection)
            self._matrix = formed.schur(ridge=problem.ridge)
        shift = damping * self.scale + problem.attention_ridge
        diagonal = np.einsum("ii->i", self._matrix)
        floor = max(shift, _SINGULAR * float(diagonal.max(initial=0.0)))
        while True:
            try:
                matrix = self._matrix + floor * np.eye(len(self._matrix))
                factor = cho_factor(matrix, lower=True, overwrite_a=True)
                break
            except LinAlgError:
                # Saturated heads leave eigenvalues that rounding takes below zero by more than the floor.
                floor = max(100.0 * floor, np.finfo(np.float64).tiny)
        step = cho_solve(factor, self.gradient.ravel())
        step = step.reshape(self.gradient.shape)
        return step, float(np.vdot(step, self.gradient))


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
        if self.n_collected == self.capacity:
            return
        # Unit curvature keeps single precision away from under- and overflow, except where
        # next to nothing pulls.
        root = np.sqrt(curvature)
        if max(float(np.abs(direction).max()), float(np.abs(image).max())) < _SINGLE_LIMIT * root:
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
