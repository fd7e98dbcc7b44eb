r"""Grader of multiple-choice questions, as in GPQA: the letter that a response chooses.

The choice is the first of these that the response contains after the chain of thought: a letter in \boxed{...}; after
`answer` (by math-verify); after `option` or `choice`, or before `is correct`; a single capital letter. The last of its
kind counts.
"""

import logging
import re
import string
from collections.abc import Sequence
from typing import Any

from rlscale.rewards.builtin import required_label
from rlscale.rewards.last_box import last_boxed
from rlscale.types import Sample

DEFAULT_LETTERS = string.ascii_uppercase[:10]
"""Letters of a row without `choices` and `valid_letters`, as in MMLU-Pro."""

_NAMED = re.compile(
    r"\b(?:option|choice)\s*(?:is)?\s*:?\s*([A-Z])\b|\b([A-Z])\s+is\s+(?:the\s+)?(?:correct|right)\b", re.I
)
_SINGLE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])(?!\s[a-z])|(?<![\w'])([B-HJ-Z])(?![\w'])")
"""A capital letter; `A` and `I` before a word are an article and a pronoun."""
_MARKS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|\\[()\[\]]|[()\[\]{}$*`_\"]")
_LOWER = re.compile(r"(answer\s*(?:is)?\s*:?\s+)([a-z])(?=\s*\.?\s*$)", re.I | re.M)


def gpqa_reward(sample: Sample) -> float:
    """1 if the response chooses the right letter, else 0.

    The right letter is the row's `correct_letter`; else the label: a letter, or the text of one of the row's `choices`.
    The letters are `valid_letters`, else one for each of `choices`, else A to J. If a response names no letter, it is
    right if it contains the text of the right choice and of no other.

    Raises:
        ValueError: there is no label, or it is no choice.
    """
    row = sample.prompt.metadata
    choices = _choices(row.get("choices"))
    given = row.get("valid_letters") or string.ascii_uppercase[: len(choices)] or DEFAULT_LETTERS
    if not isinstance(given, str | list | tuple):
        raise ValueError(f"the row's valid_letters must be a list of letters, got {given!r}; correct the data")
    letters = [str(letter).upper() for letter in given]
    label = required_label(sample).strip()
    right = _right_letter(row.get("correct_letter"), label, letters, choices)
    answer = sample.answer.rsplit("</think>", 1)[-1]
    chosen = answer_letter(answer, letters)
    if chosen is not None and right is not None:
        return float(chosen == right)
    texts = {letter: _plain(text) for letter, text in zip(letters, choices, strict=False)}
    if right is None or right not in texts:
        if right is not None:
            return 0.0
        # A label that is a text, without choices.
        return float(_contains(answer, _plain(label)))
    named = [letter for letter, text in texts.items() if _contains(answer, text)]
    return float(named == [right])


def answer_letter(answer: str, letters: Sequence[str]) -> str | None:
    """The letter that a text chooses, in upper case; None: it names none."""
    boxed = last_boxed(answer)
    if boxed is not None:
        content = _without_marks(boxed).strip().rstrip(".")
        if content.upper() in letters:
            return content.upper()
    if answer.strip().rstrip(".").upper() in letters:
        return answer.strip().rstrip(".").upper()
    text = _LOWER.sub(lambda match: match[1] + match[2].upper(), _without_marks(answer))
    for found in (_after_answer(text, letters), _last_match(_NAMED, text), _last_match(_SINGLE, text)):
        if found is not None and found in letters:
            return found
    return None


def _after_answer(text: str, letters: Sequence[str]) -> str | None:
    # Imported here: the library is optional, and takes a second.
    from math_verify import StringExtractionConfig, parse  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    extraction = StringExtractionConfig(strings=tuple(letters), try_extract_without_anchor=False)
    found = parse(text, extraction_config=[extraction], parsing_timeout=None)
    return str(found[0]).upper() if found else None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    letters = [match[1] or match[2] for match in pattern.finditer(text)]
    return letters[-1].upper() if letters else None


def _without_marks(text: str) -> str:
    """Letters stand between spaces: `(C)`, `**C**` and `C)` become ` C `."""
    return re.sub(r"([:.,)])(?=\S)", r"\1 ", _MARKS.sub(" ", text.replace(r"\boxed", " ")))


def _right_letter(given: Any, label: str, letters: Sequence[str], choices: Sequence[str]) -> str | None:
    """The letter of the right choice; None: the label is a text and there are no choices.

    Raises:
        ValueError: the label is no choice.
    """
    if isinstance(given, str) and given.strip():
        letter = given.strip().upper()
    elif len(label) == 1 and label.isalpha():
        letter = label.upper()
    elif choices:
        texts = [_plain(text) for text in choices]
        if _plain(label) not in texts:
            raise ValueError(f"the label must be a letter or one of the row's choices, got {label!r}; correct the data")
        letter = letters[texts.index(_plain(label))]
    elif not _plain(label):  # every answer would be wrong
        raise ValueError(f"the label must be a letter or a text, got {label!r}; correct the data")
    else:
        return None
    if letter not in letters:
        raise ValueError(f"the label must be one of {', '.join(letters)}, got {letter!r}; correct the data")
    return letter


def _choices(given: Any) -> list[str]:
    if isinstance(given, dict):
        return [str(text) for text in given.values()]
    return [str(text) for text in given] if isinstance(given, list | tuple) else []


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _contains(answer: str, text: str) -> bool:
    return bool(text) and f" {text} " in f" {_plain(answer)} "
