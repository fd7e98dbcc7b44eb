"""The syntax tree of a bash script, from tree-sitter, and the words of its commands as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

REDIRECTS = frozenset({"file_redirect", "heredoc_redirect", "herestring_redirect"})


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """The root of the tree. Parts with wrong syntax are nodes of the type `ERROR`."""
    return _parser().parse(text.encode()).root_node


def raw(node: Node) -> str:
    """The source text of a node."""
    assert node.text is not None, "the parser keeps the text of a tree made from bytes"
    return node.text.decode(errors="replace")


def line(node: Node) -> int:
    """1-based line of the first character, in the parsed text."""
    return node.start_point[0] + 1


def statements(node: Node) -> Iterator[Node]:
    """The named children without comments."""
    yield from (child for child in node.named_children if child.type != "comment")


def words(nodes: list[Node]) -> Iterator[tuple[Node, str]]:
    """Words of a command or an array: neighbours without a blank between them are one word.

    The grammar splits some words, such as `[0]*$N+[1]*$M`, into several nodes.
    """
    first, text, end = None, "", -1
    for node in nodes:
        if first is not None and node.start_byte == end:
            text += raw(node)
        else:
            if first is not None:
                yield first, text
            first, text = node, raw(node)
        end = node.end_byte
    if first is not None:
        yield first, text


def find_errors(node: Node) -> Iterator[Node]:
    """The outermost parts that are no bash."""
    if node.type == "ERROR" or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from find_errors(child)
