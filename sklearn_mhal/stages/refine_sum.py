"""Stage 3: refine the sum of the projections on the rows where all heads agree.

The paper finds rows on which every head has a large margin and regresses there. This stage
finds agreeing rows of every kind: it fits one pattern a row (:mod:`._agreement`), keeps the
rows that fit best, improves the sum on them, and repeats on fewer and better rows. The
improvement is a Gauss-Newton step of the residual *with the patterns eliminated*::

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
from ._agreement import RowFit, Rows, fit_patterns, load_rows, no_agreement
from ._result import StageResult, timed

# A row whose best pattern leaves the simplex by more than this is not one pattern seen through
# the sum, however small its residual.
_OUTSIDE = 0.05
_EQUATIONS_PER_UNKNOWN = 24
# Rows count by the inverse of their error; below this share of the worst one's they count alike.
_EQUALLY_SURE = 0.05
# Relative squared residual of rows that agree up to rounding.
EXACT_AGREEMENT = 1e-26
_MAX_PRODUCTS = 60
_MAX_STEPS = 12
_NEARLY_EXACT = 1e-9


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
def refine_sum(examples: Examples, total: Array, *, fraction: float = 0.005, n_steps: int = 2) -> RefinedSum:
    """Improve the sum on a shrinking fraction of agreeing rows.

    Parameters
    ----------
    examples : Examples
    total : ndarray of shape (d or d + 1, d_out)
        Start, in internal units.
    fraction : float in (0, 1]
        The smallest fraction of rows. Smaller means less bias from rows on which the heads
        only nearly agree, and more samples needed: at least 24 equations an unknown are
        kept whatever the fraction.
    n_steps : int
        Gauss-Newton steps at each fraction on the way; twice as many at the last.

    Returns
    -------
    RefinedSum
    """
    n_free = examples.n_outputs - (examples.n_tokens - 1)
    obstacle = no_agreement(examples)
    if obstacle is not None:
        return RefinedSum(
            total=examples.units.sum_out(total),
            internal=total,
            disagreement=np.inf,
            n_rows=0,
            improved=False,
            n_samples=examples.n_samples,
            message=f"kept the crude sum: {obstacle}",
        )
    rows = load_rows(examples)
    n_rows = rows.labels.shape[0] * rows.labels.shape[1]
    least = min(n_rows, int(np.ceil(_EQUATIONS_PER_UNKNOWN * total.size / n_free)))
    disagreement, n_kept = np.inf, n_rows
    for share in _shares(fraction):
        # As many rows are kept at every share, from ever more samples: the first shares only
        # leave the crude basin, and few rows are enough for that.
        n_kept = max(int(fraction * n_rows), least)
        n_used = min(len(rows.tokens), int(np.ceil(n_kept / (share * rows.labels.shape[1]))))
        some = rows.take(slice(0, n_used))
        last = n_used == len(rows.tokens)
        for step in range(_MAX_STEPS):
            fit = fit_patterns(some, total)
            samples, chosen, disagreement = _best_rows(fit, n_kept)
            if disagreement < EXACT_AGREEMENT:
                break
            kept = some.take(samples)
            total = total + _gauss_newton(kept, _take(fit, samples), chosen, total, disagreement)
            # Rows this close are exact equations, and fewer of them would determine less:
            # stay, and let the steps converge.
            settled = disagreement < _NEARLY_EXACT
            if step + 1 >= (2 * n_steps if last else n_steps) and not settled:
                break
        if last or disagreement < _NEARLY_EXACT:
            break
    return RefinedSum(
        total=examples.units.sum_out(total),
        internal=total,
        disagreement=disagreement,
        n_rows=n_kept,
        improved=True,
        n_samples=examples.n_samples,
        message=(f"the {n_kept} rows that agree best leave at most {disagreement:.1e} of the label power"),
    )


def _shares(fraction: float) -> list[float]:
    shares = [share for share in (0.5, 0.25, 0.12, 0.06, 0.03, 0.015) if share > fraction]
    return [*shares, fraction]


def _best_rows(fit: RowFit, n_kept: int) -> tuple[Array, Array, float]:
    """Return the samples that own the best rows, those rows' weights in them, and the worst error.

    Weights fall with the error, which is the square of how far the heads are apart on the row.
    """
    outside = np.maximum(-fit.patterns.min(axis=2), fit.patterns.max(axis=2) - 1.0) > _OUTSIDE
    score = np.where(outside | ~fit.determined[:, None], np.inf, fit.error)
    n_usable = int(np.isfinite(score).sum())
    if n_usable < n_kept:
        # Too few patterns inside the simplex yet: rank the rest by residual after them.
        score = np.where(np.isfinite(score), score, 1e6 + fit.error)
    threshold = np.partition(score.ravel(), n_kept - 1)[n_kept - 1]
    mask = score <= threshold
    samples = np.flatnonzero(mask.any(axis=1))
    worst = float(fit.error[mask].max())
    sureness = worst / (fit.error[samples] + max(_EQUALLY_SURE * worst, 1e-300))
    return samples, mask[samples] * sureness, worst


def _take(fit: RowFit, samples: Array) -> RowFit:
    return RowFit(
        fit.patterns[samples],
        fit.residual[samples],
        fit.error[samples],
        fit.differences[samples],
        fit.inverse[samples],
        fit.determined[samples],
    )


def _gauss_newton(rows: Rows, fit: RowFit, chosen: Array, total: Array, error: float) -> Array:
    """Solve for the change of the sum by conjugate gradients.

    The preconditioner is the regression without projectors, ``mean(phi phi^T) (x) I``.
    """
    pooled = fit.patterns @ rows.tokens
    if len(total) > pooled.shape[2]:
        pooled = np.concatenate([pooled, np.ones((*pooled.shape[:2], 1))], axis=2)
    mask = (chosen * rows.weights[:, None])[..., None]
    flat = pooled.reshape(-1, pooled.shape[2])
    gram = flat.T @ (flat * mask.reshape(-1, 1))
    # Tokens that average to zero leave nothing to regress on; the shift alone then gives no step.
    shift = max(1e-9 * float(np.trace(gram)) / len(gram), 1e-30)
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
    # As exact as the rows are: their own disagreement bounds what a better step could gain.
    forcing = min(1e-2, max(1e-16, error))
    for _ in range(_MAX_PRODUCTS):
        if not power > forcing * first:
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
