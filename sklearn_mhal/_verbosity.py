"""``verbose`` through :mod:`logging`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("sklearn_mhal")

_lock = threading.Lock()
# Requests of the fits that run now: another thread's may still be running when one ends.
_levels: list[int] = []
_before = _effective = logging.NOTSET
_handler: logging.Handler | None = None


@contextmanager
def shown(verbose: int | bool) -> Iterator[None]:
    """Show the package's log for the time of a block.

    Parameters
    ----------
    verbose : int or bool
        0 changes nothing; 1 lets INFO pass, a line for every stage; 2 and more also DEBUG, a line for
        every candidate. If no handler is set up for the logger or above it, one that writes to
        stderr is, and taken away again.
    """
    if not verbose:
        yield
        return
    level = logging.INFO if verbose == 1 else logging.DEBUG
    _enter(level)
    try:
        yield
    finally:
        _leave(level)


def _enter(level: int) -> None:
    global _before, _effective, _handler
    with _lock:
        if not _levels:
            _before, _effective = logger.level, logger.getEffectiveLevel()
            if not logger.hasHandlers():
                _handler = logging.StreamHandler()
                _handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
                logger.addHandler(_handler)
        _levels.append(level)
        _set_level()


def _leave(level: int) -> None:
    global _handler
    with _lock:
        _levels.remove(level)
        if _levels:
            _set_level()
            return
        logger.setLevel(_before)
        if _handler is not None:
            logger.removeHandler(_handler)
            _handler = None


def _set_level() -> None:
    # Never less than what the user has set up already.
    logger.setLevel(min(*_levels, _effective))
