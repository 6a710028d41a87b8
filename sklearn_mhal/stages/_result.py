"""What every stage returns, and the clock that fills in its seconds."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

logger = logging.getLogger("sklearn_mhal")


@dataclass(frozen=True, kw_only=True, eq=False)
class StageResult:
    """The part that all stage results share."""

    message: str
    """What the stage found and how sure it is, in plain words."""
    n_samples: int
    """How many samples it looked at."""
    seconds: float = 0.0
    """Wall-clock time."""


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
