"""Extension of griffe, which reads the docstrings for the site: code below `Example:` becomes a block of code."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:(?: {4}.*)?(?:\n|\Z))+)", re.MULTILINE)


class CodeExamples(griffe.Extension):
    """Without it the lines of an example would run together as text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(text: str) -> str:
    """The text of a docstring, without common indentation, with its examples as fenced code."""
    return _EXAMPLE.sub(lambda found: f"**Example**\n\n```python\n{textwrap.dedent(found[1]).strip()}\n```\n\n", text)
