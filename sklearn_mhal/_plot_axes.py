"""Axes for the displays: a figure of one's own, room in the user's axes, or the user's axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._forward import Array

# Blue for what was estimated, orange for what is marked on it, in matplotlib's own palette.
ESTIMATE, MARK, GREY = "tab:blue", "tab:orange", "0.5"


def require_matplotlib(caller: str) -> None:
    """Raise ImportError naming the extra if matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{caller} draws with matplotlib: install it with `pip install 'sklearn-mhal[plot]'`."
        ) from error


def make_grid(
    ax: Any, n_rows: int, n_columns: int, *, size: tuple[float, float], spacing: float = 0.2
) -> tuple[Any, Array]:
    """Return a figure and a grid of axes.

    Parameters
    ----------
    ax : None, Axes, or array-like of Axes
        None makes a new figure; a single axes is emptied and its room divided; several axes are
        used as they are, row by row.
    n_rows, n_columns : int
    size : tuple of float
        Width and height of a new figure in inches.
    spacing : float
        Gap between the columns of a divided axes, in units of their width. A new figure finds
        the room that labels need by itself.

    Returns
    -------
    figure : Figure
    axes : ndarray of Axes of shape (n_rows, n_columns)

    Raises
    ------
    ValueError
        If the axes given do not fit.
    """
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.gridspec import GridSpecFromSubplotSpec

    if ax is None:
        figure = plt.figure(figsize=size, layout="constrained")
        return figure, figure.subplots(n_rows, n_columns, squeeze=False)
    if isinstance(ax, Axes):
        figure, room = ax.figure, ax.get_subplotspec()
        if n_rows * n_columns == 1:
            return figure, np.array([[ax]], dtype=object)
        if room is None:
            raise ValueError("ax must come from a grid of subplots (plt.subplots) to be divided.")
        ax.set_axis_off()
        grid = GridSpecFromSubplotSpec(n_rows, n_columns, subplot_spec=room, wspace=spacing)
        axes = np.empty((n_rows, n_columns), dtype=object)
        for row in range(n_rows):
            for column in range(n_columns):
                axes[row, column] = figure.add_subplot(grid[row, column])
        return figure, axes
    axes = np.asarray(ax, dtype=object)
    if axes.size != n_rows * n_columns:
        raise ValueError(f"{n_rows} x {n_columns} axes are needed, got {axes.size}.")
    return axes.flat[0].figure, axes.reshape(n_rows, n_columns)


def few_ticks(ax: Any, *, left: bool = True, bottom: bool = True) -> None:
    """Put few integer ticks on an image, and none where another image of the grid has them."""
    from matplotlib.ticker import MaxNLocator

    for axis, wanted in ((ax.xaxis, bottom), (ax.yaxis, left)):
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        axis.set_tick_params(labelsize="small", labelbottom=wanted, labelleft=wanted)


def note(ax: Any, text: str) -> None:
    """Write why there is nothing to draw where it would be drawn."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=ax.transAxes, wrap=True)
