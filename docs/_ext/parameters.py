"""The ``learner-parameters`` directive: constructor parameters in the words of their docstring.

``.. learner-parameters:: refine_fraction refine_rounds`` lists them with type, range, default and how to
choose them, so that the pages say nothing of a parameter that the class does not say.
"""

from __future__ import annotations

import inspect
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from numpydoc.docscrape import ClassDoc
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from sklearn_mhal import MultiHeadAttentionLearner


class LearnerParameters(SphinxDirective):
    """See the module's docstring."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        documented = {item.name: item for item in ClassDoc(MultiHeadAttentionLearner)["Parameters"]}
        source = inspect.getsourcefile(MultiHeadAttentionLearner)
        self.env.note_dependency(str(source))
        lines: list[str] = []
        for name in self.arguments[0].split():
            if name not in documented:
                raise ExtensionError(f"MultiHeadAttentionLearner documents no parameter {name!r}.")
            item = documented[name]
            lines += [f"``{name}`` : {item.type}", *(f"   {line}" for line in item.desc), ""]
        holder = nodes.container(classes=["parameters"])
        self.state.nested_parse(StringList(lines, source=str(source)), 0, holder)
        return [holder]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("learner-parameters", LearnerParameters)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
