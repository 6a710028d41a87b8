"""The shape contract between the user's arrays and the stages.

Inside, tokens are ``(n, k, d)`` and labels ``(n, r, d_out)`` with ``r = k`` or 1. Outside, tokens may be
flattened to ``(n, k * d)`` and labels come in the layouts that :class:`Layout` remembers. The only
module that imports scikit-learn's private names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import _fit_context as fit_context
from sklearn.utils import check_array, check_consistent_length
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import (
    _check_feature_names_in,
    _check_sample_weight,
    _num_samples,
    column_or_1d,
    validate_data,
)

from ._forward import Array, Readout

__all__ = [
    "Interval",
    "Layout",
    "StrOptions",
    "as_generator",
    "check_tokens",
    "check_training_set",
    "check_weights",
    "feature_names_in",
    "fit_context",
    "forget_fit",
    "split_columns",
]

# Attention matrices go with the inverse square of the tokens: theirs, and the squares of scores
# and labels, stay finite.
_LARGEST, _SMALLEST = 1e50, 1e-50


@dataclass(frozen=True)
class Layout:
    """How the user's arrays map to tokens and labels."""

    n_tokens: int
    n_features: int
    n_outputs: int
    n_rows: int
    """Label rows of a sample: k for ``readout="tokens"``, else 1."""
    label_ndim: int
    """Dimensions of the y that ``fit`` saw."""
    readout: Readout = "tokens"
    """What ``fit`` was told that y shows, whatever the parameter says since."""

    def restore(self, labels: Array) -> Array:
        """Return ``(n, r, d_out)`` labels in the layout that y had in ``fit``."""
        if self.label_ndim == 3:
            return labels
        flat = labels.reshape(len(labels), self.n_rows * self.n_outputs)
        return flat[:, 0] if self.label_ndim == 1 else flat


def as_generator(random_state: Any) -> np.random.Generator:
    """Return a Generator for an int, None, RandomState or Generator.

    A RandomState or Generator is asked for a seed once, and so advanced; None draws fresh entropy.
    """
    if isinstance(random_state, np.random.Generator):
        return np.random.default_rng(random_state.integers(2**63))
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**31 - 1, size=4))
    return np.random.default_rng(random_state)


def _is_3d(X: Any) -> bool:
    shape = getattr(X, "shape", None)
    if shape is None and (isinstance(X, list | tuple) or hasattr(X, "__array__")):
        shape = np.asarray(X).shape
    return shape is not None and len(shape) == 3


def _refuse_masked(name: str, array: Any) -> None:
    # Converted to a plain array it would show what the mask hides.
    if np.ma.is_masked(array):
        raise ValueError(f"{name} has masked entries: missing values are not supported. Fill or drop them.")


def _as_numbers(name: str, array: Array, *, smallest: float = 0.0) -> Array:
    """Return the array if it holds real numbers that can be squared, or raise ValueError.

    For scikit-learn "numeric" is everything but strings and objects. `smallest` is what the largest
    entry must reach, if it is not zero.
    """
    if array.dtype.kind == "O":
        array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numeric, got dtype {array.dtype}.")
    if array.dtype.kind == "f" and array.size:
        largest = max(float(array.max()), -float(array.min()))
        if largest > _LARGEST or 0.0 < largest < smallest:
            raise ValueError(
                f"The largest entry of {name} is {largest:.1e} in size, too far from 1 for sums of its "
                f"squares. Change the unit, so that it lies between {smallest:.0e} and {_LARGEST:.0e}."
            )
    return array


def feature_names_in(estimator: Any, input_features: Any) -> Array:
    """Return the names of the columns of X: those given, those seen in ``fit``, or ``x0``, ``x1``, ..."""
    return np.asarray(_check_feature_names_in(estimator, input_features), dtype=object)


def split_columns(n_columns: int, n_tokens: Any) -> tuple[int, int]:
    """Return (k, d) for 2-D input."""
    if n_tokens == "features":
        return n_columns, 1
    n_tokens = 1 if n_tokens is None else n_tokens
    if n_columns % n_tokens:
        raise ValueError(
            f"n_tokens={n_tokens} does not divide the {n_columns} columns of X; a 2-D X holds "
            "n_tokens * n_features columns, token after token."
        )
    return n_tokens, n_columns // n_tokens


def _check_3d(X: Any, n_tokens: Any, *, smallest: float = 0.0) -> Array:
    _refuse_masked("X", X)
    X = check_array(X, dtype="numeric", allow_nd=True, ensure_min_features=0, input_name="X")
    X = _as_numbers("X", X, smallest=smallest)
    if 0 in X.shape:
        raise ValueError(f"X has shape {X.shape}: a minimum of 1 token and 1 feature is required.")
    if n_tokens == "features":
        raise ValueError("n_tokens='features' makes tokens of the columns of a 2-D X, got a 3-D X.")
    if n_tokens is not None and X.shape[1] != n_tokens:
        raise ValueError(f"X has {X.shape[1]} tokens a sample, but n_tokens={n_tokens}.")
    return np.asarray(X)


def check_training_set(
    estimator: Any, X: Any, y: Any, *, n_tokens: Any, readout: Readout
) -> tuple[Array, Array, Layout]:
    """Validate X and y for ``fit``; set ``n_features_in_`` and ``feature_names_in_``.

    Returns
    -------
    tokens : ndarray of shape (n, k, d)
    labels : ndarray of shape (n, r, d_out)
    layout : Layout

    Raises
    ------
    ValueError
        In scikit-learn's words where it has them, else naming the axis and the sizes.
    """
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None."
        )
    if _is_3d(X):
        tokens = _check_3d(X, n_tokens, smallest=_SMALLEST)
        estimator.n_features_in_ = tokens.shape[2]
        if hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
        labels = _check_labels(y)
        check_consistent_length(tokens, labels)
    else:
        labels = _check_labels(y, estimator)
        _refuse_masked("X", X)
        X = validate_data(estimator, X, dtype="numeric", estimator=estimator)
        X = _as_numbers("X", X, smallest=_SMALLEST)
        check_consistent_length(X, labels)
        tokens = X.reshape(len(X), *split_columns(X.shape[1], n_tokens))
    k = tokens.shape[1]
    n_rows = k if readout == "tokens" else 1
    return tokens, *_shape_labels(labels, tokens, n_rows, readout)


def _check_labels(y: Any, estimator: Any = None) -> Array:
    _refuse_masked("y", y)
    y = check_array(
        y,
        dtype="numeric",
        ensure_2d=False,
        allow_nd=True,
        input_name="y",
        estimator=estimator,
        ensure_min_samples=0,
        ensure_min_features=0,
    )
    y = _as_numbers("y", y)
    if y.ndim not in (1, 2, 3):
        raise ValueError(f"y must have 1, 2 or 3 dimensions, got shape {y.shape}.")
    return np.asarray(y)


def _shape_labels(labels: Array, tokens: Array, n_rows: int, readout: Readout) -> tuple[Array, Layout]:
    n_samples, k, d = tokens.shape
    ndim = labels.ndim
    if ndim == 3:
        if labels.shape[1] != n_rows:
            raise ValueError(
                f"y has shape {labels.shape}, but readout={readout!r} with {k} tokens needs "
                f"(n_samples, {n_rows}, n_outputs)."
            )
    else:
        n_columns = 1 if ndim == 1 else labels.shape[1]
        if n_columns == 0 or n_columns % n_rows:
            raise ValueError(
                f"y has {n_columns} columns, but readout='tokens' needs one block of outputs for each "
                f"of the {n_rows} tokens, so a positive multiple of {n_rows}. For one row of outputs "
                "a sample use readout='first' or readout='mean'."
            )
        labels = labels.reshape(n_samples, n_rows, n_columns // n_rows)
    layout = Layout(
        n_tokens=k, n_features=d, n_outputs=labels.shape[2], n_rows=n_rows, label_ndim=ndim, readout=readout
    )
    return labels, layout


def check_tokens(estimator: Any, X: Any, layout: Layout) -> Array:
    """Validate X for ``predict`` and return it as ``(n, k, d)`` tokens."""
    k, d = layout.n_tokens, layout.n_features
    if _is_3d(X):
        tokens = _check_3d(X, None)
        if tokens.shape[2] != d:
            raise ValueError(
                f"X has {tokens.shape[2]} features on its last axis, but {type(estimator).__name__} "
                f"is expecting {d} features as input."
            )
        if tokens.shape[1] != k:
            raise ValueError(
                f"X has {tokens.shape[1]} tokens a sample, but {type(estimator).__name__} was fitted "
                f"with {k} tokens; layer_.predict takes any number."
            )
        return tokens
    _refuse_masked("X", X)
    if estimator.n_features_in_ == k * d:
        X = _as_numbers("X", validate_data(estimator, X, dtype="numeric", reset=False))
    else:
        X = _as_numbers("X", check_array(X, dtype="numeric", estimator=estimator, input_name="X"))
        if X.shape[1] != k * d:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(estimator).__name__} is expecting "
                f"{k * d} features as input: {k} tokens of {d}."
            )
    return np.asarray(X).reshape(len(X), k, d)


def check_weights(sample_weight: Any, X: Array) -> Array | None:
    """Validate sample weights: non-negative, finite, not all zero; None stays None."""
    if sample_weight is None:
        return None
    _refuse_masked("sample_weight", sample_weight)
    return np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))


def forget_fit(estimator: Any) -> None:
    """Delete everything that marks an estimator as fitted."""
    for name in [name for name in vars(estimator) if name.endswith("_") and not name.startswith("__")]:
        delattr(estimator, name)


def check_targets(y: Any, layout: Layout) -> Array:
    """Return y as ``(n, r * d_out)`` for scoring, whatever layout it comes in."""
    labels = _check_labels(y)
    if labels.ndim == 1:
        labels = column_or_1d(labels)
    width = layout.n_rows * layout.n_outputs
    if labels.size != _num_samples(labels) * width:
        raise ValueError(f"y has shape {labels.shape}, but predictions have {width} values a sample.")
    return labels.reshape(_num_samples(labels), width)
