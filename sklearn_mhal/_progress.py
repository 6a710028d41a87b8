"""How far a fit is, told to scikit-learn's callbacks.

The stages are given a plain :class:`Progress` and know nothing of estimators or callbacks. The only
module that touches ``sklearn.callback``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sklearn.callback import CallbackSupportMixin

from .layer import AttentionLayer

__all__ = ["SILENT", "CallbackSupportMixin", "Progress", "fit_progress"]

FoundLayer = Callable[[], AttentionLayer]


class Progress:
    """Told about tasks and their steps as they happen; this one tells nobody.

    A task has steps, or tasks of its own, one after the other.
    """

    stopped = False
    """Whether a callback asked, at the end of this task, that its neighbours to come are left out."""

    @contextmanager
    def task(self, name: str, *, n_steps: int | None = 0) -> Iterator[Progress]:
        """Run a task; the Progress it yields is for what happens inside.

        Parameters
        ----------
        name : str
        n_steps : int or None
            The most steps or tasks that it can have; None if nobody knows.
        """
        yield self

    def step(self, name: str, layer: FoundLayer | None = None) -> bool:
        """Tell that a step has ended, and with which layer; return whether to leave out the rest."""
        return False

    def found(self, layer: FoundLayer) -> None:
        """Tell which layer a task ends with; called, if at all, before its end and when needed."""


SILENT = Progress()


class _CallbackProgress(Progress):
    """Told to the callbacks of an estimator, in a context of scikit-learn's."""

    def __init__(self, context: Any, fit: _Fit) -> None:
        self.context, self.fit = context, fit
        self.layer: FoundLayer | None = None

    @contextmanager
    def task(self, name: str, *, n_steps: int | None = 0) -> Iterator[Progress]:
        inner = _CallbackProgress(self.context.subcontext(task_name=name, max_subtasks=n_steps), self.fit)
        inner.context.call_on_fit_task_begin(**self.fit.arguments())
        # A task that fails does not end: the callbacks' teardown is all that follows.
        yield inner
        inner.stopped = bool(inner.context.call_on_fit_task_end(**self.fit.arguments(inner.layer)))

    def step(self, name: str, layer: FoundLayer | None = None) -> bool:
        with self.task(name) as step:
            if layer is not None:
                step.found(layer)
        return step.stopped

    def found(self, layer: FoundLayer) -> None:
        self.layer = layer


class _Fit:
    """What every hook is given."""

    def __init__(
        self,
        estimator: Any,
        X: Any,
        y: Any,
        sample_weight: Any,
        fitted: Callable[[AttentionLayer], dict[str, Any]] | None,
    ) -> None:
        metadata = {} if sample_weight is None else {"sample_weight": sample_weight}
        self.given = {"estimator": estimator, "X": X, "y": y, "metadata": metadata}
        self.fitted = fitted

    def arguments(self, layer: FoundLayer | None = None) -> dict[str, Any]:
        """Return the arguments of a hook; the fitted attributes only when a callback asks for them."""
        fitted = self.fitted
        if layer is None or fitted is None:
            return self.given
        return self.given | {"reconstruction_attributes": lambda: fitted(layer())}


@contextmanager
def fit_progress(
    estimator: Any,
    X: Any,
    y: Any,
    sample_weight: Any,
    *,
    n_tasks: int,
    fitted: Callable[[AttentionLayer], dict[str, Any]] | None = None,
) -> Iterator[Progress]:
    """Run a fit as the root task of an estimator with :class:`CallbackSupportMixin`.

    Parameters
    ----------
    estimator : estimator
        Fitted when the block ends.
    X, y, sample_weight : as given to ``fit``
    n_tasks : int
        Number of tasks of the fit.
    fitted : callable or None
        From a layer to the attributes that an estimator with it would have.
    """
    context = estimator._init_callback_context(max_subtasks=n_tasks)
    fit = _Fit(estimator, X, y, sample_weight, fitted)
    context.call_on_fit_task_begin(**fit.given)
    # Without callbacks there is nobody to build a tree of contexts for.
    yield _CallbackProgress(context, fit) if hasattr(estimator, "_skl_callbacks") else SILENT
    context.call_on_fit_task_end(**fit.given, reconstruction_attributes={})
