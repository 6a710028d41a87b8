"""One pattern for all heads: the row-wise fit that stages 2 and 3 share.

Where all heads look at the tokens in the same way, ``y_a = p^T X sum_i W_i`` with a single
pattern ``p``. Given the sum, ``p`` (with ``sum p = 1``) is a least-squares solution with k - 1
unknowns a row; generic heads that disagree leave a residual as soon as ``d_out > k - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._examples import Examples
from .._forward import Array

# Samples whose projected tokens are closer than this to coinciding, relative to their own
# size, cannot tell patterns apart.
_DEGENERATE = 1e-6
_FLOOR = 1e-13


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens and labels of some samples in internal units."""

    tokens: Array
    """(n, k, d)."""
    labels: Array
    """(n, r, d_out)."""
    weights: Array
    """(n,)."""

    @property
    def queries(self) -> Array:
        """The query tokens of the label rows, (n, r, d)."""
        return self.tokens[:, : self.labels.shape[1]]

    @property
    def label_power(self) -> float:
        """Weighted mean of ``|y_a|^2``."""
        power = np.einsum("nro,nro->n", self.labels, self.labels)
        return float(self.weights @ power) / (self.weights.sum() * self.labels.shape[1])

    def take(self, samples: Array | slice) -> Rows:
        """Return a selection of samples."""
        return Rows(self.tokens[samples], self.labels[samples], self.weights[samples])


def no_agreement(examples: Examples) -> str | None:
    """Return why no row can show a pattern of its own, None if rows can."""
    if examples.readout == "mean":
        return "averaged rows mix the patterns of all queries"
    if examples.n_tokens < 2:
        return "a single token has no pattern"
    if examples.n_outputs <= examples.n_tokens - 1:
        return f"n_outputs={examples.n_outputs} must exceed n_tokens - 1 = {examples.n_tokens - 1}"
    return None


def load_rows(examples: Examples) -> Rows:
    """Bring samples into memory."""
    weights = np.ones(examples.n_samples) if examples.weights is None else examples.weights
    return Rows(examples.white_tokens(), examples.white_labels(), weights)


@dataclass(frozen=True, eq=False)
class RowFit:
    """The best single pattern of every row."""

    patterns: Array
    """(n, r, k), rows sum to 1, entries may be negative."""
    residual: Array
    """(n, r, d_out)."""
    error: Array
    """(n, r): ``|residual|^2`` relative to the mean label power."""
    differences: Array
    """(n, k-1, d_out): projected tokens relative to the last."""
    inverse: Array
    """(n, k-1, k-1): inverse Gram matrix of the differences."""
    determined: Array
    """(n,): whether the differences are independent, so the pattern is unique."""


def fit_patterns(rows: Rows, total: Array) -> RowFit:
    """Fit one pattern to every row, given the sum of projections (intercept row included)."""
    n_features = rows.tokens.shape[2]
    projected = rows.tokens @ total[:n_features]
    if len(total) > n_features:
        projected = projected + total[n_features]
    differences = projected[:, :-1] - projected[:, -1:]
    gram = differences @ differences.transpose(0, 2, 1)
    # The inverse of the smallest eigenvalue is between trace(G^-1)/(k-1) and trace(G^-1).
    diagonal = np.einsum("nii->ni", gram)
    # Equal tokens everywhere differ in nothing, and any unit will do.
    typical = float(diagonal.mean()) or 1.0
    # Only so that equal tokens do not stop the inversion.
    diagonal += _FLOOR * typical
    inverse = np.linalg.inv(gram)
    determined = np.einsum("nii->n", inverse) * _DEGENERATE * typical < 1.0
    target = rows.labels - projected[:, -1:]
    transposed = np.ascontiguousarray(differences.transpose(0, 2, 1))
    leading = (target @ transposed) @ inverse
    # One step of refinement: the floor must not show in the residual of an exact row.
    leading += ((target - leading @ differences) @ transposed) @ inverse
    patterns = np.concatenate([leading, 1.0 - leading.sum(axis=2, keepdims=True)], axis=2)
    residual = target - leading @ differences
    error = np.einsum("nro,nro->nr", residual, residual) / max(rows.label_power, 1e-300)
    return RowFit(patterns, residual, error, differences, inverse, determined)
