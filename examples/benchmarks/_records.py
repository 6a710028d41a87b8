"""Results as lines of JSON, so that a benchmark can be run in pieces; and markdown tables of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parents[2] / "docs" / "_tables"
Record = dict[str, Any]


class Records:
    """The results in a file, one a line; what has been measured is not measured again.

    Parameters
    ----------
    path : Path
    keys : sequence of str
        What tells one result from another; of several with the same keys the last counts.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self.path, self.keys = path, tuple(keys)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._by_key = {self._key(record): record for record in map(json.loads, lines)}

    def _key(self, record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in self.keys)

    def find(self, **keys: Any) -> Record | None:
        """Return the result with these keys, if there is one."""
        return self._by_key.get(self._key(keys))

    def add(self, record: Record) -> None:
        """Append a result to the file."""
        self._by_key[self._key(record)] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def __iter__(self) -> Any:
        return iter(self._by_key.values())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(name: str, text: str, folder: Path = TABLES) -> None:
    """Write a page's table and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    print(text)


def machine(*packages: str) -> str:
    """Say what was measured on, in one sentence."""
    listed = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{os.cpu_count()} processors ({platform.machine()}), Python {platform.python_version()}, {listed}."
    )
