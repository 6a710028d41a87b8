"""What every stage returns, and the clock that fills in its seconds."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

logger = logging.getLogger("sklearn_mhal")


@dataclass(frozen=True, kw_only=True, eq=False)
class StageResult:
    """The part that all stage results share.

    A pickled result takes the same space whatever the data: what it does not hold, and other data
    would have given it, is made up for.
    """

    message: str
    """What the stage found and how sure it is, in plain words."""
    n_samples: int
    """How many samples it looked at."""
    seconds: float = 0.0
    """Wall-clock time."""
    room: int = field(default=0, repr=False)
    """Bytes of what other data would have given it."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"padding": np.zeros(self.room, dtype=np.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name != "padding":
                object.__setattr__(self, name, value)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", bound=StageResult)


def timed(stage: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a stage report its seconds and log its message."""

    @functools.wraps(stage)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        start = time.perf_counter()
        result = stage(*args, **kwargs)
        result = replace(result, seconds=time.perf_counter() - start)
        line = (stage.__name__, result.seconds, result.message)
        logger.info("%s (%.3f s): %s", *line, extra={"result": result})
        return result

    return run
