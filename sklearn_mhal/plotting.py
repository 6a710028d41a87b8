"""Pictures of a learned layer and of how it was found.

============================  ==========================================================
:class:`LayerDisplay`         the matrices of every head, beside the true ones if known
:class:`PatternDisplay`       where the heads look, on samples of your choice
:class:`HeadCountDisplay`     the spectra that counted the heads, and the held-out errors
:class:`StageDisplay`         seconds of every stage, and its error if the truth is known
============================  ==========================================================

They follow scikit-learn's convention: ``from_estimator`` draws at once, the constructor takes
arrays, and ``plot`` draws them again. Matplotlib, from the extra ``plot``, is imported when
something is drawn and not before.
"""

from __future__ import annotations

from ._plot_layer import LayerDisplay, PatternDisplay
from ._plot_stages import HeadCountDisplay, StageDisplay

__all__ = ["HeadCountDisplay", "LayerDisplay", "PatternDisplay", "StageDisplay"]
