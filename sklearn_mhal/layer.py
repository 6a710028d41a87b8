"""The layer itself: parameters, forward map, patterns and derivative products."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._forward import Array, Readout, TokenRows, stack_attention, token_chunks, unstack_attention


def _as_parameter(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    array = np.array(value, dtype=np.float64)
    if array.ndim != len(shape) or any(
        wanted is not None and wanted != found for wanted, found in zip(shape, array.shape, strict=True)
    ):
        wanted_text = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} must have shape {wanted_text}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinity.")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, init=False, eq=False, repr=False)
class AttentionLayer:
    """A multi-head attention layer with merged query-key and value-output matrices.

    ``F(X) = sum_i softmax(X Theta_i X^T + 1 (X u_i)^T) X W_i + 1 c^T``, the softmax row by row.
    This is the form in which a layer is identifiable from its inputs and outputs: a query
    bias cancels in the softmax and the value biases of all heads merge into the intercept.

    Parameters
    ----------
    attention : array-like of shape (n_heads, n_features, n_features)
        The attention matrices ``Theta_i``; queries on the left, keys on the right.
    projection : array-like of shape (n_heads, n_features, n_outputs)
        The projection matrices ``W_i``.
    key_bias : array-like of shape (n_heads, n_features), default=None
        ``u_i``, added to every query's scores; None means zeros.
    intercept : array-like of shape (n_outputs,), default=None
        ``c``, added to every output; None means zeros.

    Attributes
    ----------
    attention, projection, key_bias, intercept : read-only ndarray
        Copies of the parameters as float64.
    n_heads, n_features, n_outputs : int

    Raises
    ------
    ValueError
        If shapes do not fit together or a value is not finite.

    References
    ----------
    Chen and Li, "Provably learning a multi-head attention layer", arXiv 2402.04084, equation (1).

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhal import AttentionLayer
    >>> layer = AttentionLayer(np.zeros((1, 2, 2)), np.eye(2)[None])
    >>> layer.predict(np.array([[[1.0, -1.0], [1.0, 1.0]]]))
    array([[[1., 0.],
            [1., 0.]]])
    """

    attention: Array
    projection: Array
    key_bias: Array
    intercept: Array

    def __init__(
        self, attention: Any, projection: Any, *, key_bias: Any = None, intercept: Any = None
    ) -> None:
        attention = _as_parameter("attention", attention, (None, None, None))
        n_heads, n_features, width = attention.shape
        if n_features != width:
            raise ValueError(f"attention matrices must be square, got {attention.shape[1:]}.")
        projection = _as_parameter("projection", projection, (n_heads, n_features, None))
        n_outputs = projection.shape[2]
        if key_bias is None:
            key_bias = np.zeros((n_heads, n_features))
        if intercept is None:
            intercept = np.zeros(n_outputs)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "projection", projection)
        object.__setattr__(self, "key_bias", _as_parameter("key_bias", key_bias, (n_heads, n_features)))
        object.__setattr__(self, "intercept", _as_parameter("intercept", intercept, (n_outputs,)))

    @property
    def n_heads(self) -> int:
        """Number of heads ``m``."""
        return int(self.attention.shape[0])

    @property
    def n_features(self) -> int:
        """Width ``d`` of a token."""
        return int(self.attention.shape[1])

    @property
    def n_outputs(self) -> int:
        """Width ``d_out`` of an output row."""
        return int(self.projection.shape[2])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(n_heads={self.n_heads}, n_features={self.n_features}, "
            f"n_outputs={self.n_outputs})"
        )

    @property
    def _affine(self) -> bool:
        return bool(np.any(self.key_bias))

    def _stacked(self, *, affine: bool) -> Array:
        return stack_attention(self.attention, self.key_bias if affine else None)

    def _check_tokens(self, X: Any) -> Array:
        X = np.asarray(X)
        if X.ndim != 3 or X.shape[2] != self.n_features or X.shape[1] == 0:
            raise ValueError(
                f"X must have shape (n_samples, n_tokens, {self.n_features}) and at least one token, "
                f"got {X.shape}."
            )
        if X.dtype.kind not in "biuf":
            raise ValueError(f"X must be numeric, got dtype {X.dtype}.")
        return X

    def predict(self, X: Any) -> Array:
        """Evaluate the layer.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features)
            Tokens of any numeric dtype; never copied whole.

        Returns
        -------
        ndarray of shape (n_samples, n_tokens, n_outputs)
        """
        X = self._check_tokens(X)
        stacked = self._stacked(affine=self._affine)
        weights = self.projection.reshape(-1, self.n_outputs)
        outputs = np.empty((*X.shape[:2], self.n_outputs))
        for chunk in token_chunks(X, n_heads=self.n_heads, n_outputs=self.n_outputs):
            rows = TokenRows(X[chunk], affine=self._affine)
            pooled = rows.pooled(rows.patterns(stacked))
            np.matmul(pooled, weights, out=outputs[chunk].reshape(rows.n_rows, self.n_outputs))
        if np.any(self.intercept):
            outputs += self.intercept
        return outputs

    def attention_weights(self, X: Any) -> Array:
        """Return the attention patterns.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features)

        Returns
        -------
        ndarray of shape (n_samples, n_heads, n_tokens, n_tokens)
            ``[s, i, a, b]``: how much query ``a`` of sample ``s`` looks at token ``b`` in head
            ``i``. Non-negative; the last axis sums to 1.
        """
        X = self._check_tokens(X)
        n_samples, n_tokens, _ = X.shape
        stacked = self._stacked(affine=self._affine)
        weights = np.empty((n_samples, self.n_heads, n_tokens, n_tokens))
        for chunk in token_chunks(X, n_heads=self.n_heads, n_outputs=self.n_outputs):
            patterns = TokenRows(X[chunk], affine=self._affine).patterns(stacked)
            patterns = patterns.reshape(-1, n_tokens, self.n_heads, n_tokens)
            weights[chunk] = patterns.transpose(0, 2, 1, 3)
        return weights

    def derivative_product(self, X: Any, direction: AttentionLayer) -> Array:
        """Return the directional derivative of the outputs.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features)
        direction : AttentionLayer
            The change of every parameter, in a layer of the same shape.

        Returns
        -------
        ndarray of shape (n_samples, n_tokens, n_outputs)
            ``d/dt F_{layer + t direction}(X)`` at ``t = 0``.

        Raises
        ------
        ValueError
            If the shapes do not fit together.
        """
        X = self._check_tokens(X)
        if direction.projection.shape != self.projection.shape:
            raise ValueError(f"direction must have the shape of {self!r}, got {direction!r}.")
        stacked, change = self._stacked(affine=True), direction._stacked(affine=True)
        weights = self.projection.reshape(-1, self.n_outputs)
        weights_change = direction.projection.reshape(-1, self.n_outputs)
        outputs = np.empty((*X.shape[:2], self.n_outputs))
        for chunk in token_chunks(X, n_heads=self.n_heads, n_outputs=self.n_outputs):
            rows = TokenRows(X[chunk], affine=True)
            patterns = rows.patterns(stacked)
            product = rows.forward_product(change, patterns, rows.values(weights))
            product += rows.pooled(patterns) @ weights_change
            outputs[chunk] = product.reshape(outputs[chunk].shape)
        outputs += direction.intercept
        return outputs

    def gradient_product(self, X: Any, residual: Any) -> AttentionLayer:
        """Return the gradient of ``sum(residual * F(X))`` in every parameter.

        The adjoint of :meth:`derivative_product`.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features)
        residual : array-like of shape (n_samples, n_tokens, n_outputs)

        Returns
        -------
        AttentionLayer
            Each parameter's gradient in that parameter's place.
        """
        X = self._check_tokens(X)
        residual = np.asarray(residual, dtype=np.float64)
        if residual.shape != (*X.shape[:2], self.n_outputs):
            raise ValueError(
                f"residual must have shape {(*X.shape[:2], self.n_outputs)}, got {residual.shape}."
            )
        stacked = self._stacked(affine=True)
        weights = self.projection.reshape(-1, self.n_outputs)
        attention_gradient = np.zeros_like(stacked)
        projection_gradient = np.zeros_like(weights)
        for chunk in token_chunks(X, n_heads=self.n_heads, n_outputs=self.n_outputs):
            rows = TokenRows(X[chunk], affine=True)
            patterns = rows.patterns(stacked)
            flat = residual[chunk].reshape(rows.n_rows, self.n_outputs)
            attention_gradient += rows.backward_product(flat, patterns, rows.values(weights))
            projection_gradient += rows.pooled(patterns).T @ flat
        attention, key_bias = unstack_attention(attention_gradient, self.n_features)
        return AttentionLayer(
            attention,
            projection_gradient.reshape(self.projection.shape),
            key_bias=key_bias,
            intercept=residual.sum(axis=(0, 1)),
        )

    @classmethod
    def from_projections(
        cls,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        *,
        n_heads: int,
        query_bias: Any = None,
        key_bias: Any = None,
        value_bias: Any = None,
        output_bias: Any = None,
    ) -> AttentionLayer:
        """Read a standard transformer layer.

        Parameters
        ----------
        query, key, value : array-like of shape (n_heads * head_size, n_features)
            Weights in the ``(out_features, in_features)`` layout: ``q = query @ x``.
        output : array-like of shape (n_outputs, n_heads * head_size)
        n_heads : int
            Divides the number of rows of `query`.
        query_bias, key_bias, value_bias : array-like of shape (n_heads * head_size,), default=None
        output_bias : array-like of shape (n_outputs,), default=None

        Returns
        -------
        AttentionLayer
            ``Theta_h = Wq_h^T Wk_h / sqrt(head_size)``, ``u_h = Wk_h^T b_q,h / sqrt(head_size)``,
            ``W_h = Wv_h^T Wo_h^T`` and ``c = b_o + Wo b_v``. The key bias of the standard layer
            drops out: it adds the same score to every token.

        Raises
        ------
        ValueError
            If `n_heads` does not divide the rows or shapes do not fit together.
        """
        query = _as_parameter("query", query, (None, None))
        width, n_features = query.shape
        if n_heads < 1 or width % n_heads:
            raise ValueError(f"n_heads={n_heads} does not divide the {width} rows of query.")
        key = _as_parameter("key", key, (width, n_features))
        value = _as_parameter("value", value, (width, n_features))
        output = _as_parameter("output", output, (None, width))
        bias_q = _as_parameter("query_bias", np.zeros(width) if query_bias is None else query_bias, (width,))
        bias_v = _as_parameter("value_bias", np.zeros(width) if value_bias is None else value_bias, (width,))
        if key_bias is not None:
            _as_parameter("key_bias", key_bias, (width,))
        n_outputs = output.shape[0]
        bias_o = np.zeros(n_outputs) if output_bias is None else output_bias
        bias_o = _as_parameter("output_bias", bias_o, (n_outputs,))
        head_size = width // n_heads
        per_head = (n_heads, head_size, n_features)
        scale = 1.0 / np.sqrt(head_size)
        queries, keys, values = (w.reshape(per_head) for w in (query, key, value))
        outputs = output.reshape(n_outputs, n_heads, head_size).transpose(1, 2, 0)
        return cls(
            scale * queries.transpose(0, 2, 1) @ keys,
            values.transpose(0, 2, 1) @ outputs,
            key_bias=scale * np.einsum("hsd,hs->hd", keys, bias_q.reshape(n_heads, head_size)),
            intercept=bias_o + output @ bias_v,
        )

    def to_torch(self, *, form: str = "merged", dtype: Any = None, tolerance: float = 1e-6) -> Any:
        """Return the layer as a PyTorch module.

        Parameters
        ----------
        form : {"merged", "multihead"}, default="merged"
            "merged": a module with this layer's own four parameters, for every layer. Its ``forward``
            maps tokens (n, k, d) to (n, k, d_out).
            "multihead": a ``torch.nn.MultiheadAttention`` with ``batch_first=True``, to put a learned
            layer back into a model. It needs as many outputs as features, `n_heads` dividing them,
            and matrices whose rank is at most the head size ``n_features / n_heads``, as those of a
            layer that such a module made. Query, key, value and output weights that examples cannot
            tell apart are chosen balanced, by a singular value decomposition.
        dtype : torch.dtype, default=None
            Of the parameters; None is torch's default.
        tolerance : float >= 0, default=1e-6
            For "multihead": what a matrix may have beyond the head size, relative to its largest
            singular value; it is cut off.

        Returns
        -------
        torch.nn.Module

        Raises
        ------
        ImportError
            If torch is missing.
        ValueError
            If the layer has no such form.

        Examples
        --------
        >>> import numpy as np
        >>> layer = AttentionLayer(np.zeros((1, 2, 2)), np.eye(2)[None])
        >>> layer.to_torch()  # doctest: +SKIP
        AttentionModule(n_heads=1, n_features=2, n_outputs=2)
        """
        if form not in ("merged", "multihead"):
            raise ValueError(f"form must be 'merged' or 'multihead', got {form!r}.")
        module = _import_torch("AttentionLayer.to_torch")
        if form == "merged":
            return module.to_merged(self, dtype)
        return module.to_multihead(self, dtype, tolerance)

    @classmethod
    def from_torch(cls, module: Any) -> AttentionLayer:
        """Read the layer of a PyTorch module, in double precision.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
            On any device; ``batch_first`` does not matter, and dropout is left out. Or a module
            that :meth:`to_torch` returned.

        Returns
        -------
        AttentionLayer

        Raises
        ------
        ImportError
            If torch is missing.
        TypeError
            If `module` is something else.
        ValueError
            For ``kdim`` or ``vdim`` other than ``embed_dim``, ``add_bias_kv`` and ``add_zero_attn``.
        """
        layer = _import_torch("AttentionLayer.from_torch").from_module(module)
        return cls(layer.attention, layer.projection, key_bias=layer.key_bias, intercept=layer.intercept)


def _import_torch(name: str) -> Any:
    try:
        return importlib.import_module("sklearn_mhal._torch")
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs PyTorch: pip install 'sklearn-mhal[bench]'.") from error


def predict_readout(layer: AttentionLayer, X: Array, readout: Readout) -> Array:
    """Evaluate a layer and return only what a readout shows: ``(n, r, d_out)``."""
    if readout == "tokens":
        return layer.predict(X)
    affine = layer._affine
    stacked = layer._stacked(affine=affine)
    weights = layer.projection.reshape(-1, layer.n_outputs)
    outputs = np.empty((len(X), 1, layer.n_outputs))
    for chunk in token_chunks(X, n_heads=layer.n_heads, n_outputs=layer.n_outputs):
        rows = TokenRows(X[chunk], affine=affine, readout=readout)
        outputs[chunk, 0] = rows.pooled(rows.patterns(stacked)) @ weights
    outputs += layer.intercept
    return outputs
