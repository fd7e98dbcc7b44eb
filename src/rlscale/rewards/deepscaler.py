r"""Grader of DeepScaleR: the boxed answer after the chain of thought, compared as text and as an expression.

    response ── after </think> ──> last \boxed{...} ──> same text ──────────────────────> 1
                                                    ├─> same tuple, element by element ─> 1
                                                    └─> equal by math-verify ───────────> 1

As in slime, an answer must be evaluated: `2+2` is wrong for 4, and 2/4 for 1/2. A text label, such as a name, is
compared as text only: for math-verify `no` and `on` are equal products.
"""

import logging
import re
from typing import Any

from rlscale.rewards.boxed_math import exact_powers
from rlscale.rewards.builtin import required_label
from rlscale.rewards.last_box import last_boxed
from rlscale.types import Sample

_THOUGHT_END, _RESPONSE_MARK = "</think>", "###Response"
_REMOVED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", "$", r"\%", "%", r"^{\circ}", r"^\circ")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textit)\{([^{}]*)\}")
_UNIT_TEXT = re.compile(r"(?<=[0-9})])\s*\\(?:text|mathrm|mbox)\{\s*[^{}]*\}(?:\^\{?[0-9]\}?)?$")
_UNIT_WORD = re.compile(
    r"(?<=[0-9}])\s*(?:degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)"
    r"(?:es|s)?(?:\s*\^\{?[0-9]\}?)?$"
)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_SHORT_FRACTION = re.compile(r"\\frac(?:\{([^{}]+)\}|([0-9a-zA-Z]))(?:\{([^{}]+)\}|([0-9a-zA-Z]))")
_SLASH = re.compile(r"(?<![\w}^.])(-?[0-9]+)/([0-9]+)(?![\w{.^])")
_INTEGER = re.compile(r"-?[0-9]+(?:\.0*)?")
_FRACTION = re.compile(r"-?\\frac\{-?[0-9]+\}\{[0-9]+\}")
_BRACKETS = "()[]"


def deepscaler_reward(sample: Sample) -> float:
    r"""1 if the last \boxed{...} after the last `</think>`, or after `###Response`, equals the label.

    0 without one of these marks, or without a box after it.

    Raises:
        ValueError: there is no label.
    """
    _, mark, answer = sample.answer.rpartition(_THOUGHT_END)
    if not mark:
        parts = sample.answer.split(_RESPONSE_MARK)
        answer = parts[1] if len(parts) > 1 else ""
    return _grade(last_boxed(answer), sample)


def boxed_deepscaler_reward(sample: Sample) -> float:
    """As `deepscaler_reward`, of the last box of a response without any mark."""
    return _grade(last_boxed(sample.answer), sample)


def _grade(answer: str | None, sample: Sample) -> float:
    label = required_label(sample)
    label = last_boxed(label.replace(r"\fbox{", r"\boxed{")) or label
    if not label.strip():
        raise ValueError(f"the label must be an answer, got {sample.prompt.label!r}; correct the data")
    return float(answer is not None and answers_are_equal(answer, label))


def answers_are_equal(answer: str, label: str) -> bool:
    """Whether the answer equals the label by its text, its elements or its value."""
    found, expected = normalize_math(answer), normalize_math(label)
    if found == expected:
        return True
    if not found or not expected:
        return False
    elements, labels = _elements(found), _elements(expected)
    if elements is not None or labels is not None:
        if elements is None or labels is None or len(elements) != len(labels):
            return False
        has_same_ends = found[0] == expected[0] and found[-1] == expected[-1]
        return has_same_ends and all(map(_elements_are_equal, elements, labels))
    return _elements_are_equal(found, expected)


def normalize_math(answer: str) -> str:
    """The answer without units, spaces and variants of notation."""
    text = answer.strip().rstrip(".").replace("\n", "").replace("dfrac", "frac").replace("tfrac", "frac")
    text = _UNIT_WORD.sub("", _UNIT_TEXT.sub("", text)).strip()
    text = _TEXT.sub(r"\1", text).replace("{,}", ",")
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = re.sub(r"^[a-zA-Z]\s*(?:=|\\in(?![a-z]))", "", text)
    text = _THOUSANDS.sub("", re.sub(r"\s+", "", text))
    text = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = re.sub(r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = _SLASH.sub(r"\\frac{\1}{\2}", text)
    return text.replace(r"\frac{-", r"-\frac{").lower()


def _elements(text: str) -> list[str] | None:
    """The elements of a tuple, list or interval; None: the text is none."""
    inner = text[1:-1]
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or "," not in inner:
        return None
    return None if any(bracket in inner for bracket in _BRACKETS) else inner.split(",")


def _elements_are_equal(answer: str, label: str) -> bool:
    if answer == label:
        return True
    if _is_text(answer) or _is_text(label):
        return False
    integers = (_INTEGER.fullmatch(answer), _INTEGER.fullmatch(label))
    if any(integers):
        # Else the model could leave a computation to the grader.
        return all(integers) and _digits(answer) == _digits(label)
    if _FRACTION.fullmatch(answer) and _FRACTION.fullmatch(label):
        return False
    return _values_are_equal(answer, label)


def _values_are_equal(answer: str, label: str) -> bool:
    # Imported here: the library is optional, and takes a second.
    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    found, expected = (
        exact_powers(parse(f"\\boxed{{{text}}}", extraction_config=extraction, parsing_timeout=None))
        for text in (answer, label)
    )
    # Without an expression the library compares texts, which has been done.
    is_parsed = all(len(each) > 1 for each in (found, expected))
    return is_parsed and bool(verify(expected, found, timeout_seconds=None))


def _is_text(text: str) -> bool:
    """Words instead of an expression: over two different letters in a row, and no command of LaTeX."""
    words: list[Any] = re.findall(r"(?<![\\a-z])[a-z]{3,}", text)
    return any(
        len(set(word)) > 2 and word not in ("sqrt", "frac", "infty", "sin", "cos", "tan", "log") for word in words
    )


def _digits(text: str) -> str:
    """The integer without leading zeros; Python converts no more than 4,300 digits, and a model may repeat one."""
    number = text.split(".")[0]
    digits = number.removeprefix("-").lstrip("0")
    return f"-{digits}" if digits and number.startswith("-") else digits
