"""Stage 3: refine the sum of the projections on the rows where all heads agree.

The paper finds rows on which every head has a large margin and regresses there. This stage
finds agreeing rows of every kind: it fits one pattern a row (:mod:`._agreement`), keeps the
rows that fit best, improves the sum on them, and repeats on fewer and better rows. The
improvement is a Gauss-Newton step of the residual *with the patterns eliminated*,

    min over dW of  sum_rows |(I - Q_r) (residual_r - phi_r^T dW)|^2 ,   phi_r = p_r^T X ,

``Q_r`` the projector on the row's token differences. Alternating between patterns and sum
instead forgets that patterns adapt to the sum and stalls; with the projector a single head,
whose every row is an exact equation, is found to machine precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array
from ._agreement import RowFit, Rows, fit_patterns, load_rows
from ._result import StageResult, timed

# A row whose best pattern leaves the simplex by more than this is not one pattern seen through
# the sum, however small its residual.
_OUTSIDE = 0.05
# Relative squared residual of rows that agree up to rounding.
EXACT_AGREEMENT = 1e-26
_MAX_PRODUCTS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class RefinedSum(StageResult):
    """The refined sum."""

    total: Array
    """Estimate of ``sum_i W_i`` in the units of the data, shape (d, d_out)."""
    internal: Array
    """The same for white tokens, with the intercept as last row if one is fitted."""
    disagreement: float
    """Largest relative squared residual among the rows kept last: 0 for a single head."""
    n_rows: int
    """Number of rows kept last."""
    improved: bool
    """False where rows cannot be told apart and the crude sum is returned."""


@timed
def refine_sum(examples: Examples, total: Array, *, fraction: float = 0.005, n_steps: int = 3) -> RefinedSum:
    """Improve the sum on a shrinking fraction of agreeing rows.

    Parameters
    ----------
    examples : Examples
    total : ndarray of shape (d or d + 1, d_out)
        Start, in internal units.
    fraction : float in (0, 1]
        The smallest fraction of rows. Smaller means less bias from rows on which the heads
        only nearly agree, and more samples needed: at least six equations an unknown are
        kept whatever the fraction.
    n_steps : int
        Gauss-Newton steps at each fraction.

    Returns
    -------
    RefinedSum
    """
    n_free = examples.n_outputs - (examples.n_tokens - 1)
    unchanged = dict(
        total=examples.units.sum_out(total),
        internal=total,
        n_samples=examples.n_samples,
        n_rows=0,
        improved=False,
    )
    if examples.readout == "mean" or examples.n_tokens < 2 or n_free < 1:
        reason = (
            "averaged rows mix queries"
            if examples.readout == "mean"
            else "a single token has no pattern"
            if examples.n_tokens < 2
            else f"n_outputs={examples.n_outputs} must exceed n_tokens - 1 = {examples.n_tokens - 1}"
        )
        return RefinedSum(message=f"kept the crude sum: {reason}", disagreement=np.inf, **unchanged)
    rows = load_rows(examples)
    n_rows = rows.labels.shape[0] * rows.labels.shape[1]
    least = min(n_rows, int(np.ceil(6 * total.size / n_free)))
    # Most of the way is made on few rows: the first fractions only leave the crude basin.
    disagreement, n_kept = np.inf, n_rows
    for share in _shares(fraction):
        n_kept = max(int(share * n_rows), least)
        for _ in range(n_steps):
            fit = fit_patterns(rows, total)
            samples, chosen, worst = _best_rows(fit, n_kept)
            disagreement = worst
            total = total + _gauss_newton(rows.take(samples), _take(fit, samples), chosen, total)
            if worst < EXACT_AGREEMENT:
                break
        if disagreement < EXACT_AGREEMENT or n_kept == least:
            break
    return RefinedSum(
        total=examples.units.sum_out(total),
        internal=total,
        disagreement=disagreement,
        n_rows=n_kept,
        improved=True,
        n_samples=examples.n_samples,
        message=(
            f"the {n_kept} rows that agree best leave at most {disagreement:.1e} of the label power"
        ),
    )


def _shares(fraction: float) -> list[float]:
    shares = [share for share in (0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005) if share > fraction]
    return [*shares, fraction]


def _best_rows(fit: RowFit, n_kept: int) -> tuple[Array, Array, float]:
    """Return the samples that own the best rows, a mask of those rows in them, and the worst error."""
    outside = np.maximum(-fit.patterns.min(axis=2), fit.patterns.max(axis=2) - 1.0) > _OUTSIDE
    score = np.where(outside | ~fit.determined[:, None], np.inf, fit.error)
    n_usable = int(np.isfinite(score).sum())
    if n_usable < n_kept:
        # Too few patterns inside the simplex yet: rank the rest by residual after them.
        score = np.where(np.isfinite(score), score, 1e6 + fit.error)
    threshold = np.partition(score.ravel(), n_kept - 1)[n_kept - 1]
    mask = score <= threshold
    samples = np.flatnonzero(mask.any(axis=1))
    return samples, mask[samples], float(fit.error[mask].max())


def _take(fit: RowFit, samples: Array) -> RowFit:
    return RowFit(
        fit.patterns[samples],
        fit.residual[samples],
        fit.error[samples],
        fit.differences[samples],
        fit.inverse[samples],
        fit.determined[samples],
    )


def _gauss_newton(rows: Rows, fit: RowFit, chosen: Array, total: Array) -> Array:
    """Solve for the change of the sum by conjugate gradients.

    The preconditioner is the regression without projectors, ``mean(phi phi^T) (x) I``.
    """
    pooled = fit.patterns @ rows.tokens
    if len(total) > pooled.shape[2]:
        pooled = np.concatenate([pooled, np.ones((*pooled.shape[:2], 1))], axis=2)
    mask = (chosen * rows.weights[:, None])[..., None]
    flat = pooled.reshape(-1, pooled.shape[2])
    gram = flat.T @ (flat * mask.reshape(-1, 1))
    shift = 1e-9 * float(np.trace(gram)) / len(gram)
    inverse = np.linalg.inv(gram + shift * np.eye(len(gram)))

    def product(change: Array) -> Array:
        image = pooled @ change
        image -= ((image @ fit.differences.transpose(0, 2, 1)) @ fit.inverse) @ fit.differences
        image *= mask
        return flat.T @ image.reshape(len(flat), -1) + shift * change

    step = np.zeros_like(total)
    residual = flat.T @ (fit.residual * mask).reshape(len(flat), -1)
    preconditioned = search = inverse @ residual
    power = first = float(np.vdot(residual, preconditioned))
    for _ in range(_MAX_PRODUCTS):
        if not power > 1e-12 * first:
            break
        image = product(search)
        curvature = float(np.vdot(search, image))
        if not curvature > 0.0:
            break
        step += (power / curvature) * search
        residual -= (power / curvature) * image
        preconditioned = inverse @ residual
        previous, power = power, float(np.vdot(residual, preconditioned))
        search = preconditioned + (power / previous) * search
    return step
