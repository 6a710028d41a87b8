"""Stage 1: a crude estimate of the sum of the projection matrices.

Section 2 of the paper: correlate labels with inputs. For white tokens
``E[(1/k) X^T J Y]``, with ``J`` the all-ones matrix, is the least-squares regression of the mean
label on the mean token; regression handles every other covariance too. The estimate is
biased, not only noisy: attention correlates with the tokens it selects, so more data does
not bring the error (0.1 to 0.4 of the norm) down. It only has to be good enough to start
:mod:`~sklearn_mhal.stages.refine_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array
from ._result import StageResult, timed


@dataclass(frozen=True, kw_only=True, eq=False)
class CrudeSum(StageResult):
    """The crude sum."""

    total: Array
    """Estimate of ``sum_i W_i`` in the units of the data, shape (d, d_out)."""
    internal: Array
    """The same for white tokens, with the intercept as last row if one is fitted."""
    explained: float
    """Share of the mean label's power that the regression explains, in [0, 1]."""


@timed
def estimate_crude_sum(examples: Examples) -> CrudeSum:
    """Regress the mean label on the mean token.

    Parameters
    ----------
    examples : Examples

    Returns
    -------
    CrudeSum
    """
    width = examples.query_width
    gram, right, power = np.zeros((width, width)), np.zeros((width, examples.n_outputs)), 0.0
    for chunk in examples.chunks(1):
        mean_token = chunk.white_tokens().mean(axis=1)
        if examples.fit_intercept:
            mean_token = np.concatenate([mean_token, np.ones((len(mean_token), 1))], axis=1)
        mean_label = chunk.white_labels().mean(axis=1)
        weighted = mean_token if chunk.weights is None else mean_token * chunk.weights[:, None]
        gram += weighted.T @ mean_token
        right += weighted.T @ mean_label
        weights = 1.0 if chunk.weights is None else chunk.weights[:, None]
        power += float((weights * mean_label**2).sum())
    internal = np.linalg.lstsq(gram, right, rcond=None)[0]
    explained = float(np.vdot(internal, right)) / power if power > 0 else 1.0
    return CrudeSum(
        total=examples.units.sum_out(internal),
        internal=internal,
        explained=explained,
        n_samples=examples.n_samples,
        message=f"the mean token explains {explained:.0%} of the mean label's power",
    )
