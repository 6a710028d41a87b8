"""Displays of a layer: its matrices and its attention patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from ._forward import Array
from ._plot_axes import few_ticks, make_grid, note, require_matplotlib
from .layer import AttentionLayer
from .metrics import match_heads

# More panels than this are never meant.
_MOST_SAMPLES = 24
_PARTS = (
    ("attention", r"$\Theta$", "key feature", "query feature"),
    ("projection", "$W$", "output", "token feature"),
)


class LayerDisplay:
    """The attention and projection matrices of every head, as images.

    A column is a head. All attention matrices share one colour scale, symmetric about zero, and
    so do all projection matrices: heads of different size look different.

    Parameters
    ----------
    layer : AttentionLayer
        The learned layer.
    true_layer : AttentionLayer, default=None
        Drawn above the learned one, head by head after :func:`~sklearn_mhal.metrics.match_heads`.
        Where the numbers of heads differ there is no match and both are drawn in their own order.

    Attributes
    ----------
    figure_ : matplotlib Figure
    axes_ : ndarray of matplotlib Axes of shape (n_rows, n_columns)
        Rows: attention, projection; with a true layer true attention, learned attention, true
        projection, learned projection.
    images_ : list of matplotlib AxesImage
        Row by row.
    permutation_ : ndarray of shape (n_heads,) or None
        The learned head in every column; None if the heads could not be matched.
    errors_ : ndarray of shape (n_heads,) or None
        The larger relative Frobenius error of each head's two matrices; None without a match.

    Raises
    ------
    ValueError
        If the layers differ in features or outputs.

    See Also
    --------
    LayerDisplay.from_estimator : Draw the layer that an estimator has learned.

    Examples
    --------
    >>> from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
    >>> from sklearn_mhal.plotting import LayerDisplay
    >>> sampler = BooleanAttentionSampler(n_heads=2, n_tokens=3, n_features=6, random_state=0)
    >>> learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(*sampler.sample(500))
    >>> display = LayerDisplay.from_estimator(learner, true_layer=sampler.layer_)
    >>> display.axes_.shape
    (4, 2)
    """

    figure_: Any
    axes_: Array
    images_: list[Any]

    def __init__(self, layer: AttentionLayer, *, true_layer: AttentionLayer | None = None) -> None:
        self.layer = layer
        self.true_layer = true_layer
        self.permutation_: Array | None = None
        self.errors_: Array | None = None
        if true_layer is None:
            return
        if layer.projection.shape[1:] != true_layer.projection.shape[1:]:
            raise ValueError(f"true_layer is {true_layer!r}, which cannot be compared with {layer!r}.")
        if layer.n_heads == true_layer.n_heads:
            self.permutation_ = match_heads(true_layer, layer)
            self.errors_ = np.max(
                [
                    _relative_errors(getattr(true_layer, part), getattr(layer, part)[self.permutation_])
                    for part, *_ in _PARTS
                ],
                axis=0,
            )

    def plot(self, *, ax: Any = None, cmap: str = "RdBu_r", colorbar: bool = True) -> LayerDisplay:
        """Draw the matrices.

        Parameters
        ----------
        ax : matplotlib Axes or array-like of Axes, default=None
            One axes is divided; several are used as `axes_`. None makes a new figure.
        cmap : str or matplotlib Colormap, default="RdBu_r"
            A diverging one: its middle is zero.
        colorbar : bool, default=True

        Returns
        -------
        LayerDisplay
            self
        """
        require_matplotlib("LayerDisplay.plot")
        layers = [("learned ", self.layer)]
        if self.true_layer is not None:
            layers.insert(0, ("true ", self.true_layer))
        n_heads = max(layer.n_heads for _, layer in layers)
        n_rows = 2 * len(layers)
        size = (2.0 + 1.5 * n_heads, 0.6 + 1.6 * n_rows)
        self.figure_, self.axes_ = make_grid(ax, n_rows, n_heads, size=size)
        self.images_ = []
        for index, (part, symbol, x_label, y_label) in enumerate(_PARTS):
            axes = self.axes_[index * len(layers) : (index + 1) * len(layers)]
            limit = max(float(np.abs(getattr(layer, part)).max(initial=0.0)) for _, layer in layers)
            style = dict(cmap=cmap, vmin=-(limit or 1.0), vmax=limit or 1.0, interpolation="nearest")
            for row, (name, layer) in zip(axes, layers, strict=True):
                self._draw_row(row, getattr(layer, part), style, learned=layer is self.layer)
                row[0].set_ylabel(f"{name if len(layers) > 1 else ''}{symbol}\n{y_label}")
            for panel in axes[-1]:
                panel.set_xlabel(x_label, fontsize="small")
                few_ticks(panel, left=panel is axes[-1, 0])
            if colorbar:
                self.figure_.colorbar(
                    self.images_[-1], ax=list(axes.flat), label=f"entry of {symbol}", aspect=12 * len(layers)
                )
        for head, panel in enumerate(self.axes_[0]):
            panel.set_title(self._title(head), fontsize="medium")
        return self

    def _draw_row(self, row: Array, matrices: Array, style: dict[str, Any], *, learned: bool) -> None:
        if learned and self.permutation_ is not None:
            matrices = matrices[self.permutation_]
        for head, panel in enumerate(row):
            if head >= len(matrices):
                note(panel, "no such head")
                continue
            self.images_.append(panel.imshow(matrices[head], aspect="auto", **style))
            panel.set_box_aspect(1)
            few_ticks(panel, left=head == 0, bottom=False)

    def _title(self, head: int) -> str:
        if self.true_layer is None:
            return f"head {head}"
        error = "no match" if self.errors_ is None else f"error {self.errors_[head]:.0e}"
        return f"head {head}\n{error}"

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        true_layer: AttentionLayer | None = None,
        ax: Any = None,
        cmap: str = "RdBu_r",
        colorbar: bool = True,
    ) -> LayerDisplay:
        """Draw the layer that an estimator has learned.

        Parameters
        ----------
        estimator : MultiHeadAttentionLearner
            Fitted.
        true_layer : AttentionLayer, default=None
        ax : matplotlib Axes or array-like of Axes, default=None
        cmap : str or matplotlib Colormap, default="RdBu_r"
        colorbar : bool, default=True

        Returns
        -------
        LayerDisplay
        """
        require_matplotlib("LayerDisplay.from_estimator")
        check_is_fitted(estimator)
        return cls(estimator.layer_, true_layer=true_layer).plot(ax=ax, cmap=cmap, colorbar=colorbar)


def _relative_errors(truth: Array, estimate: Array) -> Array:
    lengths = np.linalg.norm(truth, axis=(1, 2))
    distances = np.linalg.norm(estimate - truth, axis=(1, 2))
    return np.asarray(distances / np.where(lengths > 0, lengths, 1.0))


class PatternDisplay:
    """The attention patterns of every head on a few samples.

    A row is a head and a column a sample; in each image a row is a query and its entries, which
    sum to 1, say how much of it each token gets.

    Parameters
    ----------
    patterns : ndarray of shape (n_samples, n_heads, n_tokens, n_tokens)
        As `attention_weights` returns them; at most 24 samples.
    sample_names : sequence of str, default=None
        Titles of the columns; None numbers them.

    Attributes
    ----------
    figure_ : matplotlib Figure
    axes_ : ndarray of matplotlib Axes of shape (n_heads, n_samples)
    images_ : list of matplotlib AxesImage
        Row by row.

    Raises
    ------
    ValueError
        If `patterns` has another shape or too many samples.

    See Also
    --------
    PatternDisplay.from_estimator : Draw the patterns of an estimator.

    Examples
    --------
    >>> from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
    >>> from sklearn_mhal.plotting import PatternDisplay
    >>> sampler = BooleanAttentionSampler(n_heads=2, n_tokens=3, n_features=6, random_state=0)
    >>> X, y = sampler.sample(500)
    >>> learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y)
    >>> PatternDisplay.from_estimator(learner, X[:4]).axes_.shape
    (2, 4)
    """

    figure_: Any
    axes_: Array
    images_: list[Any]

    def __init__(self, patterns: Array, *, sample_names: Any = None) -> None:
        patterns = np.asarray(patterns)
        if patterns.ndim != 4 or patterns.shape[2] != patterns.shape[3] or 0 in patterns.shape:
            raise ValueError(
                f"patterns must have shape (n_samples, n_heads, n_tokens, n_tokens), got {patterns.shape}."
            )
        if len(patterns) > _MOST_SAMPLES:
            raise ValueError(
                f"{len(patterns)} samples are too many to draw; choose {_MOST_SAMPLES} or fewer, as in X[:4]."
            )
        if sample_names is not None and len(sample_names) != len(patterns):
            raise ValueError(f"sample_names must have {len(patterns)} entries, got {len(sample_names)}.")
        self.patterns = patterns
        self.sample_names = sample_names

    def plot(self, *, ax: Any = None, cmap: str = "Blues", colorbar: bool = True) -> PatternDisplay:
        """Draw the patterns.

        Parameters
        ----------
        ax : matplotlib Axes or array-like of Axes, default=None
            One axes is divided; several are used as `axes_`. None makes a new figure.
        cmap : str or matplotlib Colormap, default="Blues"
            A sequential one: from 0 to 1.
        colorbar : bool, default=True

        Returns
        -------
        PatternDisplay
            self
        """
        require_matplotlib("PatternDisplay.plot")
        n_samples, n_heads = self.patterns.shape[:2]
        size = (1.8 + 1.5 * n_samples, 0.9 + 1.5 * n_heads)
        self.figure_, self.axes_ = make_grid(ax, n_heads, n_samples, size=size)
        self.images_ = []
        for head, row in enumerate(self.axes_):
            for sample, panel in enumerate(row):
                image = panel.imshow(
                    self.patterns[sample, head], cmap=cmap, vmin=0.0, vmax=1.0, interpolation="nearest"
                )
                self.images_.append(image)
                few_ticks(panel, left=sample == 0, bottom=head == n_heads - 1)
            row[0].set_ylabel(f"head {head}\nquery token")
        names = self.sample_names or [f"sample {sample}" for sample in range(n_samples)]
        for name, first, last in zip(names, self.axes_[0], self.axes_[-1], strict=True):
            first.set_title(str(name), fontsize="medium")
            last.set_xlabel("attended token", fontsize="small")
        if colorbar:
            self.figure_.colorbar(
                self.images_[-1], ax=list(self.axes_.flat), label="attention weight", aspect=12 * n_heads
            )
        return self

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        *,
        sample_names: Any = None,
        ax: Any = None,
        cmap: str = "Blues",
        colorbar: bool = True,
    ) -> PatternDisplay:
        """Draw the patterns of an estimator on a few samples.

        Parameters
        ----------
        estimator : MultiHeadAttentionLearner
            Fitted.
        X : array-like
            The samples to draw, in a layout that `predict` accepts; at most 24.
        sample_names : sequence of str, default=None
        ax : matplotlib Axes or array-like of Axes, default=None
        cmap : str or matplotlib Colormap, default="Blues"
        colorbar : bool, default=True

        Returns
        -------
        PatternDisplay
        """
        require_matplotlib("PatternDisplay.from_estimator")
        check_is_fitted(estimator)
        display = cls(estimator.attention_weights(X), sample_names=sample_names)
        return display.plot(ax=ax, cmap=cmap, colorbar=colorbar)
