"""A calculator for one operation at a time, so that a longer expression needs several calls."""

import operator
import re

from rlscale.agents import tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")


@tool
def calculate(expression: str) -> str:
    """One operation on two integers, e.g. 12*34.

    Args:
        expression: two integers and +, - or * between them.
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        return "error: write two integers and +, - or * between them"
    left, sign, right = found.groups()
    return str(OPERATIONS[sign](int(left), int(right)))
