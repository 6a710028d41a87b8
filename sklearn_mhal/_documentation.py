"""The link to the documentation in an estimator's HTML representation."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

_BUILT = Path(__file__).resolve().parents[1] / "docs" / "_build" / "html"
_PAGE = "generated/sklearn_mhal.{name}.html"


class DocumentationLink:
    """Mixin that tells scikit-learn where an estimator's page is.

    The ``Documentation`` address of the installed package, if it was given one, else the site built
    in the same checkout, if there is one, else no link.
    """

    _doc_link_module = "sklearn_mhal"

    @property
    def _doc_link_template(self) -> str:
        # Braces would be placeholders to scikit-learn.
        return documentation_page(type(self).__name__).replace("{", "{{").replace("}", "}}")


def documentation_page(name: str) -> str:
    """Return the address of a public class's page, empty if there is none."""
    page = _PAGE.format(name=name)
    published = published_site()
    if published:
        return f"{published.rstrip('/')}/{page}"
    return (_BUILT / page).as_uri() if (_BUILT / page).exists() else ""


@cache
def published_site() -> str:
    """Return the ``Documentation`` address among the package's URLs, empty if it has none."""
    try:
        addresses = metadata.metadata("sklearn-mhal").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    for address in addresses:
        label, _, url = address.partition(",")
        if label.strip().lower() == "documentation":
            return str(url).strip()
    return ""
