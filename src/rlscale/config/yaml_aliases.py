"""Reads and loads YAML, and limits the values that its aliases repeat: few lines can stand for more than memory holds.

Aliases share one object while a file is loaded, but Hydra, OmegaConf and JSON copy it for each of them.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

MAX_REPEATED = 10_000
"""Values that the aliases of a file may repeat. OmegaConf creates about as many in a second."""

_LONG = 100  # characters of a text that count as one more value


class AliasError(yaml.YAMLError):
    """The aliases of a file repeat too many values."""


def read_yaml_text(file: Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read, or is no regular file: reading a fifo may never end.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise OSError("it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OSError("it is no regular file; copy its content to one")
    return file.read_text(encoding="utf-8")


def load_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """The value of a YAML file of one document; raises YAMLError."""
    root = compose_yaml(text, loader)
    return None if root is None else loader("").construct_document(root)


def compose_yaml(text: str, loader: Any = yaml.SafeLoader) -> yaml.Node | None:
    """The nodes of a YAML file of one document; raises YAMLError."""
    root = yaml.compose(text, Loader=loader)
    # Without an anchor there is nothing to repeat.
    if root is not None and "&" in text:
        sizes: dict[int, int] = {}
        total = _count(root, sizes)
        if total - len(sizes) > MAX_REPEATED + len(text) // _LONG:
            raise AliasError(f"its aliases (*name) repeat more than {MAX_REPEATED} values; write fewer of them")
    return root


def check_aliases(text: str, loader: Any = yaml.SafeLoader) -> None:
    """Raises AliasError when the aliases of a text repeat too many values; the text need not be valid."""
    if "&" in text:
        try:
            compose_yaml(text, loader)
        except yaml.MarkedYAMLError:
            return  # the program that loads it reports it


def _count(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The values of a node in which each alias is replaced by what it names.

    Args:
        sizes: results by the identity of a node, 0 for one that is being counted: it contains itself.
    """
    if id(node) not in sizes:
        sizes[id(node)] = 0
        if isinstance(node, yaml.ScalarNode):
            size = 1 + len(node.value) // _LONG
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(each,) for each in node.value]
            size = 1 + sum(_count(each, sizes) for pair in pairs for each in pair)
        sizes[id(node)] = size
    return sizes[id(node)]
