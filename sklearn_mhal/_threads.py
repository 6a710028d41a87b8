"""Threads for the parts of one computation, with the same result for any number of them.

Two BLAS libraries, numpy's and scipy's, each with threads that spin, make small products many times
slower. So BLAS gets one thread, and as many as it was allowed share the samples instead: whoever
limits BLAS, be it joblib in its workers or an environment variable, limits these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeVar

from joblib import cpu_count
from threadpoolctl import ThreadpoolController

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class _Team:
    """Threads that wait for work; the one that has it works too."""

    executor: ThreadPoolExecutor
    n_helpers: int


_TEAM: ContextVar[_Team | None] = ContextVar("team", default=None)


@contextmanager
def threads_of_blas() -> Iterator[None]:
    """Limit BLAS to one thread, and let :func:`in_parts` use as many as it had."""
    controller = ThreadpoolController()
    allowed = [library["num_threads"] for library in controller.info() if library["user_api"] == "blas"]
    with (
        controller.limit(limits=1, user_api="blas"),
        team_of(min(max(allowed, default=1), cpu_count())),
    ):
        yield


@contextmanager
def team_of(n_threads: int) -> Iterator[None]:
    """Let :func:`in_parts` use that many threads, this one included."""
    if n_threads < 2:
        yield
        return
    with ThreadPoolExecutor(n_threads - 1, thread_name_prefix="sklearn_mhal") as executor:
        token = _TEAM.set(_Team(executor, n_threads - 1))
        try:
            yield
        finally:
            _TEAM.reset(token)


def in_parts(function: Callable[[In], Out], parts: Sequence[In]) -> list[Out]:
    """Return ``function`` of every part, in order, computed by the threads there are."""
    team = _TEAM.get()
    if team is None or len(parts) < 2:
        return [function(part) for part in parts]
    results: list[Any] = [None] * len(parts)
    waiting = deque(range(len(parts)))

    def work() -> None:
        while True:
            try:
                at = waiting.popleft()
            except IndexError:
                return
            results[at] = function(parts[at])

    # A helper's context carries numpy's flags, and no team: it must not wait for itself.
    helpers = [
        team.executor.submit(copy_context().run, _alone, work)
        for _ in range(min(team.n_helpers, len(parts) - 1))
    ]
    try:
        work()
    finally:
        # No part may still run when the caller goes on, whatever has happened to the others.
        waiting.clear()
        failures = [helper.exception() for helper in helpers]
    for failure in failures:
        if failure is not None:
            raise failure
    return results


def _alone(work: Callable[[], None]) -> None:
    _TEAM.set(None)
    work()


def sum_in_parts(function: Callable[[In], Any], parts: Sequence[In]) -> Any:
    """Return the sum of ``function`` over the parts, added in their order."""
    return reduce(add, in_parts(function, parts))
