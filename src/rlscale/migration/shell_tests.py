"""Conditions of bash: `[ ... ]`, `[[ ... ]]` and `test`. A condition that only a run could answer is None."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from tree_sitter import Node

from rlscale.migration.shell_tree import raw
from rlscale.migration.shell_values import Source, Text, is_known, value_of
from rlscale.migration.shell_words import WordExpander

Answer = bool | None
FileExists = Callable[[str], Answer]

_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_FILE_TESTS = frozenset("-" + letter for letter in "abcdefghknprstuwxGLNOS")


def negate(answer: Answer) -> Answer:
    return None if answer is None else not answer


def both(left: Answer, right: Answer) -> Answer:
    return False if False in (left, right) else None if None in (left, right) else True


def either(left: Answer, right: Answer) -> Answer:
    return True if True in (left, right) else None if None in (left, right) else False


class ConditionReader:
    """Answers the conditions of a script."""

    def __init__(self, expander: WordExpander, exists: FileExists) -> None:
        self._expander, self._exists = expander, exists

    def answer(self, node: Node, source: Source) -> Answer:
        """The answer of a `test_command` node or a part of it."""
        match node.type:
            case "test_command" | "parenthesized_expression":
                inner = node.named_children
                return self.answer(inner[0], source) if inner else False
            case "unary_expression":
                return self._unary(node, source)
            case "binary_expression":
                return self._binary(node, source)
            case "negated_command":
                return negate(self.answer(node.named_children[0], source))
        text = self._expander.condition(raw(node), source)
        return bool(value_of(text)) if is_known(text) else None

    def answer_words(self, words: list[Text], source: Source) -> Answer:
        """The answer of the command `test` with these words."""
        self._expander.decide(words)
        if not all(is_known(word) for word in words):
            return None
        values = [value_of(word) for word in words]
        if values[:1] == ["!"]:
            return negate(self.answer_words(words[1:], source))
        if len(values) == 2:
            return self._answer_unary(values[0], values[1])
        if len(values) == 3:
            return _compare(values[0], values[1], values[2], is_pattern=False)
        return bool(values and values[0]) if len(values) < 2 else None

    def _unary(self, node: Node, source: Source) -> Answer:
        operator = raw(node.children[0])
        if operator == "!":
            return negate(self.answer(node.children[-1], source))
        text = self._expander.condition(raw(node.children[-1]), source)
        return self._answer_unary(operator, value_of(text)) if is_known(text) else None

    def _answer_unary(self, operator: str, value: str) -> Answer:
        if operator in ("-z", "-n"):
            return (value == "") == (operator == "-z")
        if operator == "-v":
            return None
        return self._exists(value) if operator in _FILE_TESTS else None

    def _binary(self, node: Node, source: Source) -> Answer:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator")
        if left is None or right is None or sign is None:
            return None
        operator = raw(sign)
        if operator in ("&&", "-a"):
            return both(self.answer(left, source), self.answer(right, source))
        if operator in ("||", "-o"):
            return either(self.answer(left, source), self.answer(right, source))
        first, second = (self._expander.condition(raw(part), source) for part in (left, right))
        if not is_known(first) or not is_known(second):
            return None
        quoted = raw(right)[:1] in "\"'"
        return _compare(value_of(first), operator, value_of(second), is_pattern=not quoted)


def _compare(left: str, operator: str, right: str, *, is_pattern: bool) -> Answer:
    if operator in ("=", "=="):
        return fnmatchcase(left, right) if is_pattern else left == right
    if operator == "!=":
        return not (fnmatchcase(left, right) if is_pattern else left == right)
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    if operator == "=~":
        return _matches(left, right)
    if operator in _NUMERIC:
        try:
            return _NUMERIC[operator](int(left or 0), int(right or 0))
        except ValueError:
            return False
    return None


def _matches(text: str, pattern: str) -> Answer:
    # A pattern with nested repeats could take forever; scripts use short ones.
    if len(pattern) > 80 or len(text) > 500 or re.search(r"[+*]\)[+*]", pattern):
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
