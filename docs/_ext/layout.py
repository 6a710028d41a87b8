"""The ``modules`` directive: every module of a folder with the first sentence of its docstring.

``.. modules:: sklearn_mhal/stages`` lists the folder as it is, so that the page cannot fall behind.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective


def first_sentence(path: Path) -> str:
    """Return the first paragraph of a module's docstring, up to its first full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ExtensionError(f"{path.name} has no docstring.")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


class Modules(SphinxDirective):
    """See the module's docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        folder = Path(self.env.srcdir).parent / self.arguments[0]
        paths = sorted(folder.glob("*.py"), key=lambda path: (path.name.startswith("_"), path.name))
        lines = [".. list-table::", "   :widths: 24 76", ""]
        for path in paths:
            self.env.note_dependency(str(path))
            lines += [f"   * - ``{path.name}``", f"     - {first_sentence(path)}"]
        holder = nodes.container(classes=["modules"])
        self.state.nested_parse(StringList(lines, source=str(folder)), 0, holder)
        return [holder]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("modules", Modules)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
