"""When a fit's recovery error first falls under each threshold."""

from __future__ import annotations

import time
from typing import Any

from sklearn_mhal import AttentionLayer, head_recovery_error

THRESHOLDS = (1e-4, 1e-6, 1e-8)


class Watch:
    """A callback that looks at every layer that the fit tells of, on a clock that stands still meanwhile."""

    def __init__(self, truth: AttentionLayer) -> None:
        self.truth = truth
        self.seconds: dict[str, float] = {}
        self.began, self.paused = time.perf_counter(), 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began - self.paused

    def setup(self, estimator: Any, context: Any) -> None: ...

    def teardown(self, estimator: Any, context: Any) -> None: ...

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None: ...

    def on_fit_task_end(self, estimator: Any, context: Any, *, fitted_estimator: Any = None) -> bool:
        now, looked = self.elapsed(), time.perf_counter()
        if fitted_estimator is not None:
            error = head_recovery_error(self.truth, fitted_estimator.layer_)
            for threshold in THRESHOLDS:
                if error < threshold:
                    self.seconds.setdefault(f"{threshold:g}", now)
        self.paused += time.perf_counter() - looked
        return False
