"""The fitted stages as a mapping that prints as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import numpy as np


class Stages(Mapping[str, Any]):
    """Stage results by name, in the order they ran.

    Behaves as a read-only dict; its representation is a table of what each stage found.

    Parameters
    ----------
    results : mapping of str to StageResult
    room : int, default=0
        Bytes that a pickle is longer by, to make up for what the estimator could not say.
    """

    def __init__(self, results: Mapping[str, Any], *, room: int = 0) -> None:
        self._results = dict(results)
        self._room = room

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"padding": np.zeros(self._room, dtype=np.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._results, self._room = state["_results"], state["_room"]

    def __getitem__(self, name: str) -> Any:
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        rows = [f"{'stage':<11} {'seconds':>8}  found"]
        rows += [f"{name:<11} {item.seconds:>8.3f}  {item.message}" for name, item in self.items()]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{escape(name)}</td><td style='text-align:right'>{item.seconds:.3f}</td>"
            f"<td style='text-align:left'>{escape(item.message)}</td></tr>"
            for name, item in self.items()
        )
        return (
            "<table><thead><tr><th>stage</th><th>seconds</th><th>found</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )
