"""The ``measured`` directive: a table that a benchmark wrote, or how to make it.

``.. measured:: against_torch`` shows ``_tables/against_torch.md`` and, below it, the pictures
``_tables/against_torch*.png``. The content of the directive is shown instead where there is no such table,
so that a page never quotes a number nobody measured.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def is_row(line: str) -> bool:
    """Return whether a line of markdown belongs to a table."""
    return line.lstrip().startswith("|")


def cells_of(line: str) -> list[str]:
    """Split a table row of markdown into its cells."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def blocks_of(text: str) -> list[list[str]]:
    """Split markdown into tables, headings and paragraphs, each a list of lines."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not line.strip():
            blocks.append([])
            continue
        starts_new = not blocks or (blocks[-1] and is_row(blocks[-1][-1]) != is_row(line))
        if starts_new or line.startswith("#") or (blocks[-1] and blocks[-1][-1].startswith("#")):
            blocks.append([])
        blocks[-1].append(line)
    return [block for block in blocks if block]


class Measured(SphinxDirective):
    """See the module's docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "_tables" / f"{self.arguments[0]}.md"
        self.env.note_dependency(str(path))
        if not path.exists():
            note = nodes.note()
            self.state.nested_parse(self.content, self.content_offset, note)
            return [note]
        result: list[nodes.Node] = []
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if is_row(block[0]):
                result.append(self._table(block, str(path)))
            elif block[0].startswith("#"):
                heading = re.sub(r"^#+\s*", "", block[0])
                result.append(nodes.rubric("", heading))
            else:
                result += self._parsed("\n".join(block), str(path))
        return result + self._pictures(path)

    def _pictures(self, table: Path) -> list[nodes.Node]:
        figures: list[nodes.Node] = []
        for path in sorted(table.parent.glob(f"{table.stem}*.png")):
            self.env.note_dependency(str(path))
            name = path.stem.replace("_", " ")
            image = nodes.image(uri=f"/_tables/{path.name}", alt=f"Measured: {name}", candidates={})
            figures.append(nodes.figure("", image))
        return figures

    def _parsed(self, text: str, source: str) -> list[nodes.Node]:
        # Single backquotes are code in markdown.
        text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), source=source), 0, holder)
        return list(holder.children)

    def _table(self, lines: list[str], source: str) -> nodes.Node:
        rows = [cells_of(line) for line in lines]
        ruled = len(rows) > 1 and all(re.fullmatch(r":?-+:?", cell) for cell in rows[1])
        head, body = (rows[:1], rows[2:]) if ruled else ([], rows)
        width = len(rows[0])
        table = nodes.table(classes=["measured"])
        group = nodes.tgroup(cols=width)
        table += group
        group += [nodes.colspec(colwidth=1) for _ in range(width)]
        for part, part_rows in ((nodes.thead(), head), (nodes.tbody(), body)):
            for cells in part_rows:
                row = nodes.row()
                for cell in (cells + [""] * width)[:width]:
                    entry = nodes.entry()
                    entry += self._parsed(cell, source)
                    row += entry
                part += row
            if part_rows:
                group += part
        return table


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("measured", Measured)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
