"""Samples that can travel: to another thread by reference, to another process as little as possible.

A pass over all samples is cut into blocks of consecutive samples, the same blocks for every pass and
every number of workers. Within a process a block is a view. Pickled, it is its own rows, in the dtype
they were given in; or, of a memory-mapped file, the file's path and where in it the rows are, and
whoever unpickles the block maps that part of the file.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._examples import Examples
from ._forward import Array
from ._memory import samples_per_chunk

# Of a block as floats, whatever it is given as: tens of milliseconds of work, and little to send.
_BLOCK_MIB = 4.0


@dataclass(frozen=True)
class FileRows:
    """Consecutive rows of an array in a file."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]

    def open(self) -> Array:
        """Map the rows, read-only."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=self.shape)


def rows_in_file(array: Array, start: int, stop: int) -> FileRows | None:
    """Return where rows of an array are in its file; None if it has none or is not in C order."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or not isinstance(root.base, mmap.mmap) or root.filename is None:
        return None
    rows = array[start:stop]
    if not rows.flags.c_contiguous:
        return None
    ahead = rows.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return FileRows(str(root.filename), array.dtype, int(root.offset + ahead), rows.shape)


class Block:
    """Some samples, in memory order.

    Parameters
    ----------
    examples : Examples
        With `order` ascending.
    by_path : bool, default=True
        Whether rows of files travel as paths.
    """

    arrived = False
    """Whether it came from another process."""

    def __init__(self, examples: Examples, *, by_path: bool = True) -> None:
        self.examples, self.by_path = examples, by_path
        self.files: dict[str, FileRows] = {}

    def chunks(self, size: int) -> Iterator[Examples]:
        """Yield the samples, at most `size` at a time."""
        opened: dict[str, Any] = {name: rows.open() for name, rows in self.files.items()}
        examples = replace(self.examples, **opened)
        for start in range(0, examples.n_samples, size):
            yield examples.between(start, start + size)

    def in_files(self) -> dict[str, FileRows]:
        """Return where the rows of tokens and labels are in files, for what is."""
        if self.arrived:
            return self.files
        if not self.by_path:
            return {}
        order = self.examples.order
        first, stop = int(order[0]), int(order[-1]) + 1
        found = {
            name: rows_in_file(getattr(self.examples, name), first, stop) for name in ("tokens", "labels")
        }
        return {name: rows for name, rows in found.items() if rows is not None}

    def __sizeof__(self) -> int:
        """Bytes that would be sent, nearly."""
        located = self.in_files()
        arrays = [getattr(self.examples, name) for name in ("tokens", "labels") if name not in located]
        return object.__sizeof__(self) + sum(self.examples.n_samples * array[:1].nbytes for array in arrays)

    def __getstate__(self) -> dict[str, Any]:
        """Return the block's own rows, or where they are in files."""
        if self.arrived:
            # From one worker to the next.
            return {"examples": self.examples, "files": self.files}
        order = self.examples.order
        located = self.in_files()
        if len(order) < int(order[-1]) - int(order[0]) + 1 and len(located) == 1:
            # Rows are left out, in the file but not of what is sent.
            located = {}
        sent: dict[str, Any] = {
            name: np.empty(0) if name in located else getattr(self.examples, name)[order]
            for name in ("tokens", "labels")
        }
        positions = order - order[0] if located else np.arange(len(order))
        return {"examples": replace(self.examples, **sent, order=positions), "files": located}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, arrived=True)


def blocks_of(examples: Examples) -> list[Block]:
    """Cut all samples into blocks, in memory order."""
    floats = examples.tokens[:1].size + examples.labels[:1].size
    size = samples_per_chunk(8 * floats, examples.n_samples, mib=_BLOCK_MIB)
    ranks = np.argsort(examples.order, kind="stable")
    return [Block(examples.pick(ranks[start : start + size])) for start in range(0, len(ranks), size)]


def send_once(blocks: list[Block], backend: Any) -> None:
    """Let a cluster keep the blocks that have rows to send, until they are forgotten here.

    joblib's Dask backend looks up its `data_futures` for what it has been told to scatter when the
    backend was set up; without that, it would send a block anew for every pass.
    """
    futures = getattr(backend, "data_futures", None)
    client = getattr(backend, "client", None)
    if futures is None or client is None:
        return
    for block in blocks:
        if id(block) not in futures and len(block.in_files()) < 2:
            futures[id(block)] = client.scatter(block, hash=False)
            weakref.finalize(block, futures.pop, id(block), None)
