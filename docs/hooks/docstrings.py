"""A griffe extension: the doctest at the end of a docstring becomes the section of its examples.

Without a heading, Markdown reads `>>>` as three nested quotations.
"""

import re
import textwrap
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)


def sectioned(docstring: str) -> str:
    """Return a docstring with each doctest at its margin under a heading of its own."""
    return _DOCTEST.sub(lambda m: "Examples:\n" + textwrap.indent(m.group(), "    "), docstring)


class Examples(griffe.Extension):
    """Rewrites the docstring of every object that griffe reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give the doctest of one object its heading."""
        if obj.docstring:
            obj.docstring.value = sectioned(obj.docstring.value)
