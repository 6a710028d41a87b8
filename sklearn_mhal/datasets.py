"""Random layers and their examples: data whose truth is known."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from ._draws import STRUCTURES, TOKEN_DISTRIBUTIONS, repeated_tokens
from ._forward import Array
from .layer import AttentionLayer

RandomState = int | np.integer[Any] | np.random.RandomState | np.random.Generator | None

_REPEATED = "repeated"
# Gives the labels' standard deviation to about a percent, which is all a noise level needs.
_N_SCALE_SAMPLES = 4096


def _check_integer(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < smallest:
        raise ValueError(f"{name} must be an integer in [{smallest}, inf), got {value!r}.")


def _check_scale(name: str, value: Any) -> None:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not 0 <= value < np.inf:
        raise ValueError(f"{name} must be a real number in [0, inf), got {value!r}.")


def _check_option(name: str, value: Any, options: Collection[str]) -> None:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {sorted(options)}, got {value!r}.")


def _seed_sequence(random_state: Any) -> np.random.SeedSequence:
    if random_state is None:
        return np.random.SeedSequence()
    if isinstance(random_state, np.random.RandomState):
        return np.random.SeedSequence(random_state.randint(0, 2**32, size=4, dtype=np.uint32).tolist())
    if isinstance(random_state, np.random.Generator):
        return np.random.SeedSequence(random_state.integers(0, 2**32, size=4).tolist())
    is_integer = isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool)
    if is_integer and random_state >= 0:
        return np.random.SeedSequence(int(random_state))
    raise ValueError(
        "random_state must be None, an integer in [0, inf), a numpy RandomState or a numpy Generator, "
        f"got {random_state!r}."
    )


class BooleanAttentionSampler:
    """Draw a random attention layer, then examples of its inputs and outputs without end.

    Parameters
    ----------
    n_heads : int, default=2
        Number of heads ``m``, at least 1.
    n_tokens : int, default=4
        Tokens in a sample ``k``, at least 1. With one token only the sum of the projections
        shows in the labels; "parity" needs exactly 2.
    n_features : int, default=8
        Width ``d`` of a token, at least 1; "parity" needs at least ``n_heads + 1``.
    n_outputs : int, default=None
        Width ``d_out`` of an output row, at least 1; None means `n_features`.
    attention_scale : float, default=2.0
        Frobenius norm ``s >= 0`` of every attention matrix, which is the standard deviation
        of the logits of different Boolean or standard Gaussian tokens. Below 1 the patterns
        are soft, from 8 on nearly one-hot. Two structures use it as said below.
    structure : {"incoherent", "low_rank", "correlated", "multiscale", "parity"}, default="incoherent"
        How the heads are drawn.

        - "incoherent": Gaussian attention matrices scaled to norm ``s``; projections with
          independent entries N(0, 1/d).
        - "low_rank": like merged heads of a transformer: both matrices are products of
          Gaussian factors with inner size ``max(1, d // 4)``.
        - "correlated": all heads share a common Gaussian part; two heads have a cosine of
          about 0.5, in attention and projection, up to fluctuations of order ``1/d``.
        - "multiscale": heads of different size; the attention norms fall geometrically from
          ``s`` to ``s / 4`` and the factors on the N(0, 1/d) projections from 1 to 1/8.
        - "parity": a layer that is hard to learn, see Notes; attention norms exceed ``s``.
    token_distribution : str, default="boolean"
        How tokens are drawn; samples and tokens are always independent.

        - "boolean": uniform on {-1, +1}^d, int8.
        - "biased_bits": independent -1 or +1, +1 with probability 0.7, int8.
        - "zero_one": uniform on {0, 1}^d, int8.
        - "repeated": uniform on a vocabulary of ``min(4 d, 2^d)`` different Boolean tokens, int8.
        - "gaussian": standard normal, float64.
        - "correlated_gaussian": normal with mean 0, variance 1 and correlation
          ``0.5 ** |i - j|`` of features i and j, float64.
    noise_std : float, default=0.0
        Standard deviation of the Gaussian noise on every label, in the label's own units.
        For noise relative to the labels multiply by `label_std_` of a sampler with the same seed.
    layer : AttentionLayer, default=None
        A layer of one's own. `n_heads`, `n_features`, `n_outputs`, `attention_scale`,
        `structure` and the scales of bias and intercept are then ignored.
    key_bias_scale : float, default=0.0
        Standard deviation of the Gaussian entries of the key biases; 0 means none.
    intercept_scale : float, default=0.0
        Standard deviation of the Gaussian entries of the intercept; 0 means none.
    random_state : int, RandomState, Generator or None, default=None
        Seeds layer, tokens and noise, each with its own stream: the same seed gives the same
        layer whatever the tokens, and the same tokens whatever the noise. A RandomState or
        Generator is asked once, in the constructor, and so advanced; None is unpredictable.

    Attributes
    ----------
    layer_ : AttentionLayer
        The truth, available before the first sample.
    label_std_ : float
        Standard deviation of the labels without noise, pooled over the output columns:
        the root of their mean variance. Estimated to about a percent, at first use, from
        4096 samples outside the stream.

    Raises
    ------
    ValueError
        If a parameter is outside its range.

    See Also
    --------
    make_boolean_attention : The same as a function.

    Notes
    -----
    *The "parity" layer.* Let ``S`` be a random set of ``m`` coordinates without the first and
    ``c_i = -m + 1, -m + 3, ..., m - 1``. With two tokens, ``w`` a random unit vector and::

        Theta_i = s (sum_{j in S} e_j + c_i e_1) e_1^T,    W_i = (-1)^i e_1 w^T,

    the logits of a query ``q`` are ``+-s (sum_S q + c_i q_1)`` where the tokens differ in their
    first coordinate. That number is never 0, so for large ``s`` head i outputs
    ``q_1 sign(q_1 sum_S q + c_i)`` times its sign and ``w``: a threshold on the count of
    coordinates in ``S`` that equal ``q_1``. One threshold lies between any two neighbouring counts,
    so the alternating sum of the heads flips with every unit of the count; with the product
    ``chi = prod_S q`` it equals ``-chi w`` for odd ``m`` and ``q_1 (1 - chi) w`` for even ``m``.
    Where the first coordinates agree it is ``-q_1 w`` or 0, whatever ``S`` is.

    So ``S`` enters the labels through monomials of degree ``m`` and more only. Every
    product of fewer than ``m`` input bits that touches a coordinate beyond the first has
    correlation 0 with the labels, and statistics of low degree (sums, covariances, interaction
    moments) cannot tell one ``S`` from another. At finite ``s`` the steps are
    ``tanh(s t)``, ``|t| >= 1``, and correlations of order ``exp(-2 s)`` remain. The attention
    matrices are collinear up to one entry and the projections cancel in pairs, so no row
    shows a pattern that all heads share either.

    References
    ----------
    Chen and Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: the
    learning problem, and the lower bound behind the "parity" family.

    Examples
    --------
    >>> from sklearn_mhal import BooleanAttentionSampler
    >>> sampler = BooleanAttentionSampler(n_heads=3, n_tokens=4, n_features=8, random_state=0)
    >>> X, y = sampler.sample(100)
    >>> X.shape, X.dtype, y.shape
    ((100, 32), dtype('int8'), (100, 32))
    >>> sampler.layer_
    AttentionLayer(n_heads=3, n_features=8, n_outputs=8)
    """

    def __init__(
        self,
        n_heads: int = 2,
        n_tokens: int = 4,
        n_features: int = 8,
        *,
        n_outputs: int | None = None,
        attention_scale: float = 2.0,
        structure: str = "incoherent",
        token_distribution: str = "boolean",
        noise_std: float = 0.0,
        layer: AttentionLayer | None = None,
        key_bias_scale: float = 0.0,
        intercept_scale: float = 0.0,
        random_state: RandomState = None,
    ) -> None:
        self.n_heads = n_heads
        self.n_tokens = n_tokens
        self.n_features = n_features
        self.n_outputs = n_outputs
        self.attention_scale = attention_scale
        self.structure = structure
        self.token_distribution = token_distribution
        self.noise_std = noise_std
        self.layer = layer
        self.key_bias_scale = key_bias_scale
        self.intercept_scale = intercept_scale
        self.random_state = random_state
        self._validate()
        seeds = _seed_sequence(random_state).spawn(5)
        layer_rng, vocabulary_rng, self._token_rng, self._noise_rng, self._scale_rng = map(
            np.random.default_rng, seeds
        )
        self.layer_ = self._draw_layer(layer_rng) if layer is None else layer
        if token_distribution == _REPEATED:
            self._draw_tokens = repeated_tokens(vocabulary_rng, self.layer_.n_features)
        else:
            self._draw_tokens = TOKEN_DISTRIBUTIONS[token_distribution]

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        values = {name: getattr(self, name) for name in defaults}
        changed = (
            f"{name}={value!r}"
            for name, value in values.items()
            if value is not defaults[name].default and value != defaults[name].default
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def _validate(self) -> None:
        _check_integer("n_heads", self.n_heads, 1)
        _check_integer("n_tokens", self.n_tokens, 1)
        _check_integer("n_features", self.n_features, 1)
        if self.n_outputs is not None:
            _check_integer("n_outputs", self.n_outputs, 1)
        for name in ("attention_scale", "noise_std", "key_bias_scale", "intercept_scale"):
            _check_scale(name, getattr(self, name))
        _check_option("structure", self.structure, STRUCTURES)
        _check_option("token_distribution", self.token_distribution, [*TOKEN_DISTRIBUTIONS, _REPEATED])
        if self.layer is not None:
            if not isinstance(self.layer, AttentionLayer):
                raise ValueError(f"layer must be an AttentionLayer or None, got {self.layer!r}.")
        elif self.structure == "parity":
            if self.n_tokens != 2:
                raise ValueError(f'n_tokens must be 2 with structure="parity", got {self.n_tokens}.')
            if self.n_features < self.n_heads + 1:
                raise ValueError(
                    f'n_features must be in [n_heads + 1, inf) with structure="parity", '
                    f"got n_features={self.n_features} and n_heads={self.n_heads}."
                )

    def _draw_layer(self, rng: np.random.Generator) -> AttentionLayer:
        n_outputs = self.n_features if self.n_outputs is None else self.n_outputs
        attention, projection = STRUCTURES[self.structure](
            rng, self.n_heads, self.n_features, n_outputs, self.attention_scale
        )
        key_bias = rng.normal(scale=self.key_bias_scale, size=attention.shape[:2])
        intercept = rng.normal(scale=self.intercept_scale, size=n_outputs)
        return AttentionLayer(attention, projection, key_bias=key_bias, intercept=intercept)

    @cached_property
    def label_std_(self) -> float:
        """Standard deviation of the labels without noise, pooled over the output columns."""
        tokens = self._draw_tokens(self._scale_rng, (_N_SCALE_SAMPLES, self.n_tokens, self.layer_.n_features))
        return float(np.sqrt(self.layer_.predict(tokens).var(axis=(0, 1)).mean()))

    def sample(self, n_samples: int, *, as_tokens: bool = False) -> tuple[Array, Array]:
        """Draw the next examples of the stream.

        Two calls for 5 samples give what one call for 10 gives (labels up to rounding).

        Parameters
        ----------
        n_samples : int
            At least 1.
        as_tokens : bool, default=False
            Whether to keep tokens as an axis of their own.

        Returns
        -------
        X : ndarray of shape (n_samples, n_tokens * n_features) or (n_samples, n_tokens, n_features)
            int8 or float64, see `token_distribution`; 3-D with ``as_tokens=True``.
        y : ndarray of shape (n_samples, n_tokens * n_outputs) or (n_samples, n_tokens, n_outputs)

        Raises
        ------
        ValueError
            If `n_samples` is not a positive integer.
        """
        _check_integer("n_samples", n_samples, 1)
        X = self._draw_tokens(self._token_rng, (int(n_samples), self.n_tokens, self.layer_.n_features))
        y = self.layer_.predict(X)
        if self.noise_std > 0:
            y += self.noise_std * self._noise_rng.standard_normal(y.shape)
        if as_tokens:
            return X, y
        return X.reshape(n_samples, -1), y.reshape(n_samples, -1)


def make_boolean_attention(
    n_samples: int = 100,
    return_layer: bool = False,
    *,
    as_tokens: bool = False,
    n_heads: int = 2,
    n_tokens: int = 4,
    n_features: int = 8,
    n_outputs: int | None = None,
    attention_scale: float = 2.0,
    structure: str = "incoherent",
    token_distribution: str = "boolean",
    noise_std: float = 0.0,
    layer: AttentionLayer | None = None,
    key_bias_scale: float = 0.0,
    intercept_scale: float = 0.0,
    random_state: RandomState = None,
) -> tuple[Array, Array] | tuple[Array, Array, AttentionLayer]:
    """Draw examples of a random attention layer.

    The first samples of a :class:`BooleanAttentionSampler`, whose documentation says more
    about the parameters and gives the constructions.

    Parameters
    ----------
    n_samples : int, default=100
        At least 1.
    return_layer : bool, default=False
        Whether to return the true layer as well.
    as_tokens : bool, default=False
        Whether X and y are 3-D, with tokens as an axis of their own.
    n_heads, n_tokens, n_features : int, default=2, 4, 8
        Sizes ``m``, ``k`` and ``d``, each at least 1.
    n_outputs : int, default=None
        Width of an output row, at least 1; None means `n_features`.
    attention_scale : float, default=2.0
        Frobenius norm of the attention matrices, non-negative.
    structure : {"incoherent", "low_rank", "correlated", "multiscale", "parity"}, default="incoherent"
        How the heads are drawn.
    token_distribution : {"boolean", "biased_bits", "zero_one", "repeated", "gaussian", \
            "correlated_gaussian"}, default="boolean"
        How tokens are drawn.
    noise_std : float, default=0.0
        Standard deviation of the label noise, in the label's own units, non-negative.
    layer : AttentionLayer, default=None
        A layer of one's own; the parameters that describe a layer are then ignored.
    key_bias_scale, intercept_scale : float, default=0.0
        Standard deviations of the entries of key biases and intercept, non-negative.
    random_state : int, RandomState, Generator or None, default=None
        Seeds everything; a RandomState or Generator is advanced.

    Returns
    -------
    X : ndarray of shape (n_samples, n_tokens * n_features) or (n_samples, n_tokens, n_features)
    y : ndarray of shape (n_samples, n_tokens * n_outputs) or (n_samples, n_tokens, n_outputs)
    layer : AttentionLayer
        The truth, only with ``return_layer=True``.

    Raises
    ------
    ValueError
        If a parameter is outside its range.

    Examples
    --------
    >>> from sklearn_mhal import make_boolean_attention
    >>> X, y, layer = make_boolean_attention(20, True, n_heads=3, as_tokens=True, random_state=0)
    >>> X.shape, y.shape, layer.n_heads
    ((20, 4, 8), (20, 4, 8), 3)
    """
    _check_integer("n_samples", n_samples, 1)
    sampler = BooleanAttentionSampler(
        n_heads,
        n_tokens,
        n_features,
        n_outputs=n_outputs,
        attention_scale=attention_scale,
        structure=structure,
        token_distribution=token_distribution,
        noise_std=noise_std,
        layer=layer,
        key_bias_scale=key_bias_scale,
        intercept_scale=intercept_scale,
        random_state=random_state,
    )
    X, y = sampler.sample(n_samples, as_tokens=as_tokens)
    return (X, y, sampler.layer_) if return_layer else (X, y)
