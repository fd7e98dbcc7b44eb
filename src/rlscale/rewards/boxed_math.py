r"""Reward for answers in \boxed{...} that equal the label as numbers or expressions, by the library math-verify.

It runs in a process of rewards, whose processor time is limited: sympy may never return for an expression that a model
generated, and the library's own time limit is a signal that works in a main thread only.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

from rlscale.rewards.builtin import required_label
from rlscale.rewards.last_box import last_boxed
from rlscale.types import Sample

_PERCENT = re.compile(r"\s*\\?%\s*$")

_MAX_EXPONENT = 100
"""Larger ones stay floats: an exact power may have more digits than memory."""

MAX_CPU_S = 5.0
"""Processor time of one comparison. Not wall time: the load of the machine must not change rewards."""


def math_reward(sample: Sample) -> float:
    r"""1 if the last \boxed{...} of the response equals the label, else 0; also 0 without a box.

    Raises:
        ValueError: there is no label, or math-verify cannot read it.
    """
    # Imported here: the library is optional, and takes a second.
    from math_verify import verify  # type: ignore[import-untyped]

    label = required_label(sample)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    # Before the answer: with a wrong label no response of the group is graded, not even one without a box.
    expected = _parse(last_boxed(label) or label)
    if not expected:
        raise ValueError(f"the label must be a number or LaTeX expression, got {label!r}; correct the data")
    answer = last_boxed(sample.answer)
    if answer is None:
        return 0.0
    return float(verify(expected, _parse(answer), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse  # imported as above

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    # A percent sign is a unit, as in the evaluation of MATH; math-verify reads it only as text within a box.
    text = _PERCENT.sub("", text)
    return exact_powers(parse(f"\\boxed{{{text}}}", extraction_config=extraction, parsing_timeout=None))


def exact_powers(parsed: Iterable[Any]) -> list[Any]:
    r"""Values that math-verify parsed, with decimal exponents as fractions: 2^{0.5} is \sqrt{2}.

    The library reads the number 0.5 as a fraction, but keeps it as a float in an exponent, and then finds 2^{0.5} equal
    to a label \sqrt{2} or not by the order in which it compares them.
    """
    from sympy import Basic, Float, Pow, Rational  # type: ignore[import-untyped]  # comes with math-verify

    def is_decimal(value: Any) -> bool:
        return isinstance(value, Pow) and isinstance(value.exp, Float) and abs(value.exp) <= _MAX_EXPONENT

    def exact(value: Any) -> Any:
        return Pow(value.base, Rational(str(value.exp)))

    return [value.replace(is_decimal, exact) if isinstance(value, Basic) else value for value in parsed]
