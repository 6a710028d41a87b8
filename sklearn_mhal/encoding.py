"""Positions for tokens, so that their order can matter."""

from __future__ import annotations

from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import FLOAT_DTYPES, check_is_fitted, validate_data

from ._documentation import DocumentationLink
from ._forward import Array
from ._progress import CallbackSupportMixin, fit_progress
from ._tokens import Interval, StrOptions, feature_names_in, fit_context, split_columns


class TokenPositionEncoder(CallbackSupportMixin, DocumentationLink, TransformerMixin, BaseEstimator):
    """Append to every token features that say which one it is.

    Attention treats its tokens as a set: without positions, exchanging two tokens of a sample
    exchanges their outputs and changes nothing else. With positions a score can depend on where query
    and key are, and a key bias alone can single out a token.

    Parameters
    ----------
    n_tokens : int >= 1 or "features", default="features"
        How the columns of `X` make tokens: that many, one after the other; "features" makes every
        column a token of width one, as tables of unlike columns need. The learner that follows is
        given the number, since after this step a token has more columns.
    encoding : {"onehot", "sinusoidal", "ramp"}, default="onehot"
        What is appended to token ``a`` of ``k``:

        - "onehot": ``k`` features, 1 in the a-th and 0 elsewhere. Every token can be treated in its
          own way. Best for few tokens, or for columns with meanings of their own.
        - "sinusoidal": ``sin`` and ``cos`` of ``pi a 2^j / k`` for ``j = 0, ..., n_frequencies - 1``. Near
          tokens are alike, and a score can be any combination of cosines of the distance between
          query and key. Best for sequences.
        - "ramp": one feature that rises from -1 to 1 (0 for a single token). A score can prefer early
          or late tokens and, with the query's position, those before or after it. The fewest
          parameters.
    n_frequencies : int >= 1 or None, default=None
        For "sinusoidal". None takes ``ceil(log2(k))`` and at least one: at the highest, neighbours are a
        quarter to half a turn apart. Fewer make positions smoother.

    Attributes
    ----------
    positions_ : ndarray of shape (n_tokens_, n_position_features)
        What is appended to each token.
    n_tokens_ : int
        Tokens a sample.
    n_features_in_ : int
        Columns of `X`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Defined only when the columns of `X` have names that are all strings.

    See Also
    --------
    MultiHeadAttentionLearner : Learns attention over the tokens that this makes.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal import TokenPositionEncoder
    >>> encoder = TokenPositionEncoder(n_tokens=3, encoding="ramp")
    >>> encoder.fit_transform([[5.0, 6.0, 7.0]])
    array([[ 5., -1.,  6.,  0.,  7.,  1.]])
    >>> list(encoder.get_feature_names_out())
    ['x0', 'token0_position0', 'x1', 'token1_position0', 'x2', 'token2_position0']
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_tokens": [StrOptions({"features"}), Interval(Integral, 1, None, closed="left")],
        "encoding": [StrOptions({"onehot", "sinusoidal", "ramp"})],
        "n_frequencies": [None, Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        n_tokens: Any = "features",
        *,
        encoding: str = "onehot",
        n_frequencies: int | None = None,
    ) -> None:
        self.n_tokens = n_tokens
        self.encoding = encoding
        self.n_frequencies = n_frequencies

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None) -> TokenPositionEncoder:
        """Count the columns; nothing is learned from their values.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * n_features)
        y : ignored

        Returns
        -------
        self
        """
        with fit_progress(self, X, y, None, n_tasks=0):
            columns = validate_data(self, X, dtype=FLOAT_DTYPES).shape[1]
            self.n_tokens_, _ = split_columns(columns, self.n_tokens)
            self.positions_ = _positions(self.n_tokens_, self.encoding, self.n_frequencies)
        return self

    def transform(self, X: Any) -> Array:
        """Append the positions.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * n_features)

        Returns
        -------
        ndarray of shape (n_samples, n_tokens * (n_features + n_position_features))
            Token after token: its features, then its position's.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOAT_DTYPES, reset=False)
        tokens = X.reshape(len(X), self.n_tokens_, -1)
        width = tokens.shape[2]
        encoded = np.empty((*tokens.shape[:2], width + self.positions_.shape[1]), dtype=X.dtype)
        encoded[:, :, :width] = tokens
        encoded[:, :, width:] = self.positions_
        return encoded.reshape(len(X), -1)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Return the names of the columns that ``transform`` makes.

        Parameters
        ----------
        input_features : array-like of str or None, default=None
            Names of the columns of `X`; None takes ``feature_names_in_`` or ``x0``, ``x1``, ...

        Returns
        -------
        ndarray of str objects
            Each token's own names, then ``token{a}_position{j}``.
        """
        check_is_fitted(self)
        names = feature_names_in(self, input_features).reshape(self.n_tokens_, -1)
        n_added = self.positions_.shape[1]
        added = [[f"token{a}_position{j}" for j in range(n_added)] for a in range(self.n_tokens_)]
        return np.concatenate([names, np.array(added, dtype=object)], axis=1).ravel()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _positions(n_tokens: int, encoding: str, n_frequencies: int | None) -> Array:
    if encoding == "onehot":
        return np.eye(n_tokens)
    if encoding == "ramp":
        return np.linspace(-1.0, 1.0, n_tokens)[:, None] if n_tokens > 1 else np.zeros((1, 1))
    if n_frequencies is None:
        n_frequencies = max(1, int(np.ceil(np.log2(n_tokens))))
    angles = np.pi * np.outer(np.arange(n_tokens), 2.0 ** np.arange(n_frequencies)) / n_tokens
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(n_tokens, -1)
