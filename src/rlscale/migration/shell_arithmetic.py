"""Integer arithmetic of bash: `$((a * 2))`, `((i++))`, `let`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


class ShellArithmeticError(ValueError):
    """An expression that cannot be computed without a run of the script."""


_BINARY: Mapping[type[ast.AST], Callable[[int, int], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Pow: operator.pow,
        ast.LShift: operator.lshift,
        ast.RShift: operator.rshift,
        ast.BitAnd: operator.and_,
        ast.BitOr: operator.or_,
        ast.BitXor: operator.xor,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
    }
)
_MAX_POWER = 64

_STEP = re.compile(r"^\s*(\w+)\s*(\+\+|--)\s*$|^\s*(\+\+|--)\s*(\w+)\s*$")
_ASSIGN = re.compile(r"^\s*(\w+)\s*([-+*/%]?)=(?!=)(.*)$", re.DOTALL)
_TERNARY = re.compile(r"^([^?]*)\?([^:]*):(.*)$", re.DOTALL)
_OCTAL = re.compile(r"(?<![\w.])0+(\d)")


def evaluate(text: str, read: Callable[[str], str], assign: Callable[[str, str], None]) -> int:
    """The value of an expression whose `$` expansions are already done.

    Args:
        read: the value of a variable; empty when it is unset.
        assign: sets a variable.

    Raises ShellArithmeticError for what is no integer expression.
    """
    text = text.strip()
    if step := _STEP.match(text):
        name = step[1] or step[4]
        before = _number(read(name))
        after = before + (1 if "++" in text else -1)
        assign(name, str(after))
        return before if step[1] else after
    if found := _ASSIGN.match(text):
        name, sign, right_side = found.groups()
        value = evaluate(f"({read(name) or 0}) {sign} ({right_side})" if sign else right_side, read, assign)
        assign(name, str(value))
        return value
    if chosen := _TERNARY.match(text):
        condition, yes, no = chosen.groups()
        return evaluate(yes if evaluate(condition, read, assign) else no, read, assign)
    return _compute(_parse(text), read)


def _parse(text: str) -> ast.expr:
    # The operators of C in Python's words; the right_side of the grammar is the same.
    words = text.replace("&&", " and ").replace("||", " or ")
    words = re.sub(r"!(?!=)", " not ", words)
    try:
        return ast.parse(_OCTAL.sub(r"\1", words).strip() or "0", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ShellArithmeticError(text) from error


def _compute(node: ast.expr, read: Callable[[str], str]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.Name(id=name):
            return _number(read(name))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, read)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _compute(operand, read)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _compute(operand, read))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_compute(operand, read)
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(_compute(value, read) for value in values))
        case ast.BoolOp(values=values):
            return int(any(_compute(value, read) for value in values))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return int(_apply(type(op), _compute(left, read), _compute(right, read)))
        case ast.BinOp(left=left, op=op, right=right):
            return _apply(type(op), _compute(left, read), _compute(right, read))
    raise ShellArithmeticError(ast.unparse(node))


def _apply(op: type[ast.AST], left: int, right: int) -> int:
    if op in (ast.Div, ast.Mod):
        if right == 0:
            raise ShellArithmeticError("division by 0")
        # Bash truncates towards 0, unlike Python's // and %.
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if op is ast.Div else left - quotient * right
    if op in (ast.Pow, ast.LShift) and abs(right) > _MAX_POWER:
        raise ShellArithmeticError(f"{left} to the power of {right}")
    if op not in _BINARY:
        raise ShellArithmeticError(op.__name__)
    value = int(_BINARY[op](left, right))
    return (value + 2**63) % 2**64 - 2**63  # bash counts in 64 bits


def _number(text: str) -> int:
    text = text.strip()
    try:
        return int(text, 0) if text else 0
    except ValueError:
        raise ShellArithmeticError(text) from None
