"""Names that end in an underscore, in the types of numpydoc sections.

``ndarray of shape (n_heads_, d)`` is plain text to a reader of the source and a reference to a target
called ``n_heads`` to Sphinx. Such names are quoted before numpydoc sees the docstring.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_NAME = re.compile(r"(?<![\w`])(\w+_)(?![\w`])")


def quote_names(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put backquotes around the names in every ``name : type`` line."""
    for at, line in enumerate(lines):
        names, colon, kind = line.partition(" : ")
        if colon and re.fullmatch(r"\s*\w+(, \w+)*", names):
            lines[at] = names + colon + _NAME.sub(r"``\1``", kind)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the listener, ahead of numpydoc's."""
    app.connect("autodoc-process-docstring", quote_names, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
