"""Patterns of layers as Megatron-LM writes them on its command line: `([0]*3+[1]*58)`, `[1]*48`, `1`."""

from __future__ import annotations

import ast

MAX_LAYERS = 10_000
"""Longest list that a pattern may stand for: `[1]*10**9` would fill the memory."""

PATTERN_FIELDS = frozenset({"megatron.moe_layer_freq"})
"""Keys whose value may be a pattern: Megatron-LM evaluates the text as Python, and passes on a number or a list."""


def read_pattern(path: str, value: object) -> object:
    """The number or list that the text of a layer pattern stands for; any other value as it is."""
    if path not in PATTERN_FIELDS or not isinstance(value, str):
        return value
    try:
        found = _evaluate(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return value  # the check of types reports it
    return found


def _evaluate(node: ast.expr) -> int | list[int]:
    """Lists, `+` of two lists and `*` of a list and a number. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_evaluate(each) for each in node.elts]
        if numbers := [each for each in entries if isinstance(each, int)]:
            return _checked(numbers, len(entries))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _checked([*left, *right], len(left) + len(right))
        layers, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(node.op, ast.Mult) and isinstance(layers, list) and isinstance(times, int):
            # The length is checked before the list is made.
            return _checked(layers, len(layers), times=times)
    raise ValueError("a pattern has lists of numbers, + and *")


def _checked(layers: list[int], length: int, *, times: int = 1) -> list[int]:
    if length != len(layers) or not 0 <= times * length <= MAX_LAYERS:
        raise ValueError("a pattern is a flat list of layers")
    return layers * times
