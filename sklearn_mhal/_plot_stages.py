"""Displays of a fit: how the heads were counted, what every stage cost and knew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from ._forward import Array
from ._plot_axes import ESTIMATE, GREY, MARK, make_grid, note, require_matplotlib
from ._stage_errors import StageError, stage_errors
from .layer import AttentionLayer
from .stages.heads import EXACT

# Stands for zero on a logarithmic axis.
_ZERO = 1e-18


class HeadCountDisplay:
    """What counted the heads: two spectra that propose and the held-out error that decides.

    Left, the singular values of the interaction moments: ``m`` heads stand out of the rest.
    Middle, the smallest eigenvalues of the certified equalities: ``m`` heads leave ``m - 1`` of them
    near zero. The largest drop, or rise, is marked where the stage took it for a gap. Right, the
    best held-out error for every number of heads that was tried.

    Parameters
    ----------
    singular_values : array-like of shape (n_values,)
        Descending; empty if the moments were not computed.
    eigenvalues : array-like of shape (n_values,)
        Ascending; empty if no row was certified.
    errors_by_count : mapping of int to float
        Relative squared held-out error by number of heads.
    n_heads : int
        The number that was chosen: of a given number, those that are not left at zero.
    moment_count, sculpt_count : int, default=None
        The numbers that the spectra proposed; None where no gap was clear.

    Attributes
    ----------
    figure_ : matplotlib Figure
    axes_ : ndarray of matplotlib Axes of shape (1, 3)

    See Also
    --------
    HeadCountDisplay.from_estimator : Draw them for an estimator.

    Examples
    --------
    >>> from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
    >>> from sklearn_mhal.plotting import HeadCountDisplay
    >>> sampler = BooleanAttentionSampler(n_heads=2, n_tokens=3, n_features=6, random_state=0)
    >>> learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(*sampler.sample(500))
    >>> HeadCountDisplay.from_estimator(learner).n_heads
    2
    """

    figure_: Any
    axes_: Array

    def __init__(
        self,
        *,
        singular_values: Any,
        eigenvalues: Any,
        errors_by_count: Mapping[int, float],
        n_heads: int,
        moment_count: int | None = None,
        sculpt_count: int | None = None,
    ) -> None:
        self.singular_values = np.asarray(singular_values, dtype=np.float64)
        self.eigenvalues = np.asarray(eigenvalues, dtype=np.float64)
        self.errors_by_count = dict(errors_by_count)
        self.n_heads = n_heads
        self.moment_count = moment_count
        self.sculpt_count = sculpt_count

    def plot(self, *, ax: Any = None) -> HeadCountDisplay:
        """Draw the spectra and the held-out errors.

        Parameters
        ----------
        ax : matplotlib Axes or array-like of three Axes, default=None
            One axes is divided; three are used as `axes_`. None makes a new figure.

        Returns
        -------
        HeadCountDisplay
            self
        """
        require_matplotlib("HeadCountDisplay.plot")
        self.figure_, self.axes_ = make_grid(ax, 1, 3, size=(11.5, 3.8), spacing=0.5)
        moments, certified, held_out = self.axes_[0]
        _draw_spectrum(moments, self.singular_values, self.moment_count, self.moment_count)
        moments.set(title="Interaction moments", ylabel="singular value / largest")
        below = None if self.sculpt_count is None else self.sculpt_count - 1
        _draw_spectrum(certified, self.eigenvalues, self.sculpt_count, below)
        certified.set(title="Certified equalities", ylabel="eigenvalue / largest shown")
        self._draw_errors(held_out)
        return self

    def _draw_errors(self, ax: Any) -> None:
        counts = np.array(sorted(self.errors_by_count))
        errors = np.array([max(self.errors_by_count[count], _ZERO) for count in counts])
        chosen = counts == self.n_heads
        shown = errors
        if errors.min() < EXACT:
            ax.axhline(EXACT, color=GREY, linestyle=":", label="exact below")
            shown = np.append(errors, EXACT)
        ax.plot(counts, errors, "o-", color=ESTIMATE)
        ax.plot(
            counts[chosen], errors[chosen], "o", color=MARK, markersize=9, label=f"chosen: {self.n_heads}"
        )
        _logarithmic(ax, shown)
        ax.set_xlim(counts[0] - 1, counts[-1] + 1)
        ax.set_xticks(np.arange(counts[0], counts[-1] + 1))
        ax.legend(frameon=False)
        ax.set(title="Held-out rows", xlabel="number of heads", ylabel="relative squared error")

    @classmethod
    def from_estimator(cls, estimator: Any, *, ax: Any = None) -> HeadCountDisplay:
        """Draw how an estimator counted its heads.

        Parameters
        ----------
        estimator : MultiHeadAttentionLearner
            Fitted; with a given `n_heads` the errors are those of that number alone.
        ax : matplotlib Axes or array-like of three Axes, default=None

        Returns
        -------
        HeadCountDisplay
        """
        require_matplotlib("HeadCountDisplay.from_estimator")
        check_is_fitted(estimator)
        sculpture, span, heads = (estimator.stages_[name] for name in ("sculpt", "span", "heads"))
        display = cls(
            singular_values=span.singular_values,
            eigenvalues=sculpture.eigenvalues,
            errors_by_count=heads.errors_by_count,
            n_heads=estimator.n_heads_ - heads.n_idle,
            moment_count=next((frame.n_heads for frame in span.frames if frame.source == "moments"), None),
            sculpt_count=sculpture.n_heads,
        )
        return display.plot(ax=ax)


def _draw_spectrum(ax: Any, values: Array, count: int | None, n_below: int | None) -> None:
    """Draw a spectrum, with its gap after the first `n_below` values if it proposes a count."""
    largest = float(values.max(initial=0.0))
    if largest == 0.0:
        note(ax, "not computed")
        return
    heights = np.maximum(values / largest, _ZERO)
    ax.plot(np.arange(1, len(values) + 1), heights, "o", color=ESTIMATE)
    _logarithmic(ax, heights)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="index")
    label = "no clear gap" if count is None else f"proposes {count} head{'' if count == 1 else 's'}"
    if n_below is not None and 0 < n_below < len(values):
        pair = heights[n_below - 1 : n_below + 1]
        ax.fill_between([n_below, n_below + 1], pair.min(), pair.max(), color=MARK, alpha=0.4, linewidth=0)
        label = f"gap {pair.max() / pair.min():.2g}: {label}"
    ax.plot([], [], "s", color=MARK if ":" in label else "none", alpha=0.4, label=label)
    ax.legend(frameon=False, handletextpad=0.3)


def _logarithmic(ax: Any, values: Array) -> None:
    """Make the axis logarithmic, with room around the values and readable ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    decades = float(np.log10(high / low))
    # Wider than the points need, so that a legend has room above them.
    ax.set_ylim(low / 10 ** max(0.1 * decades, 0.1), high * 10 ** max(0.25 * decades, 0.25))
    if decades < 2.0:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 0.8 else (1, 2, 3, 4, 5, 6, 8)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)


class StageDisplay:
    """Seconds of every stage and, where the truth is known, its error.

    Parameters
    ----------
    seconds : mapping of str to float
        Wall-clock seconds by stage, in the order of the stages.
    errors : mapping of str to StageError, default=None
        Error by stage; a stage that estimates nothing comparable is left out.

    Attributes
    ----------
    figure_ : matplotlib Figure
    axes_ : ndarray of matplotlib Axes of shape (1, 1) or (1, 2)

    See Also
    --------
    StageDisplay.from_estimator : Draw them for an estimator.

    Examples
    --------
    >>> from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
    >>> from sklearn_mhal.plotting import StageDisplay
    >>> sampler = BooleanAttentionSampler(n_heads=2, n_tokens=3, n_features=6, random_state=0)
    >>> learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(*sampler.sample(500))
    >>> display = StageDisplay.from_estimator(learner, true_layer=sampler.layer_)
    >>> list(display.seconds)
    ['crude_sum', 'sculpt', 'refine_sum', 'span', 'heads', 'polish']
    """

    figure_: Any
    axes_: Array

    def __init__(
        self, seconds: Mapping[str, float], *, errors: Mapping[str, StageError] | None = None
    ) -> None:
        self.seconds = dict(seconds)
        self.errors = None if errors is None else dict(errors)

    def plot(self, *, ax: Any = None) -> StageDisplay:
        """Draw seconds, and errors if there are any.

        Parameters
        ----------
        ax : matplotlib Axes or array-like of Axes, default=None
            One axes is divided where errors are drawn too; two are used as `axes_`. None makes a
            new figure.

        Returns
        -------
        StageDisplay
            self
        """
        require_matplotlib("StageDisplay.plot")
        n_panels = 1 if self.errors is None else 2
        self.figure_, self.axes_ = make_grid(ax, 1, n_panels, size=(5.2 * n_panels, 3.6))
        time = self.axes_[0, 0]
        bars = time.barh(np.arange(len(self.seconds)), list(self.seconds.values()), color=ESTIMATE)
        time.bar_label(bars, fmt="%.3f", padding=3, fontsize="small")
        time.margins(x=0.15)
        time.set(title="Time", xlabel="seconds")
        if self.errors is not None:
            self._draw_errors(self.axes_[0, 1], self.errors)
        for panel in self.axes_[0]:
            panel.set_yticks(np.arange(len(self.seconds)), [name.replace("_", " ") for name in self.seconds])
            panel.set_ylim(len(self.seconds) - 0.4, -0.7)
            panel.tick_params(labelleft=panel is time)
        return self

    def _draw_errors(self, ax: Any, errors: Mapping[str, StageError]) -> None:
        for place, name in enumerate(self.seconds):
            item = errors.get(name)
            if item is None or not np.isfinite(item.error):
                text = "nothing to compare" if item is None else "another number of heads"
                ax.text(
                    0.5, place, text, color=GREY, ha="center", va="center", transform=ax.get_yaxis_transform()
                )
                continue
            value = max(item.error, _ZERO)
            ax.plot(value, place, "D" if item.is_angle else "o", color=ESTIMATE, markersize=8)
            offset = dict(xytext=(0, 8), textcoords="offset points", ha="center", fontsize="small")
            ax.annotate(f"{item.error:.1e}", (value, place), **offset)
        finite = [max(item.error, _ZERO) for item in errors.values() if np.isfinite(item.error)]
        ax.set_xscale("log")
        ax.set_xlim(min(finite, default=0.1) / 50, max([1.0, *finite]) * 50)
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
        ax.plot([], [], "o", color=ESTIMATE, label="relative error")
        ax.plot([], [], "D", color=ESTIMATE, label="sine of the angle to the span")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False, fontsize="small")
        ax.set(title="Against the truth", xlabel="error")

    @classmethod
    def from_estimator(
        cls, estimator: Any, *, true_layer: AttentionLayer | None = None, ax: Any = None
    ) -> StageDisplay:
        """Draw the stages of an estimator's fit.

        Parameters
        ----------
        estimator : MultiHeadAttentionLearner
            Fitted.
        true_layer : AttentionLayer, default=None
            The layer that the examples came from; None draws the seconds alone.
        ax : matplotlib Axes or array-like of Axes, default=None

        Returns
        -------
        StageDisplay

        Raises
        ------
        ValueError
            If the true layer has another number of features or outputs than the data.
        """
        require_matplotlib("StageDisplay.from_estimator")
        check_is_fitted(estimator)
        stages = estimator.stages_
        errors = None if true_layer is None else stage_errors(stages, true_layer)
        seconds = {name: result.seconds for name, result in stages.items()}
        return cls(seconds, errors=errors).plot(ax=ax)
