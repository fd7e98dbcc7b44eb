"""Graders that compare the text of an answer: F1 of words, and the last line `Answer: ...` as in DAPO."""

import re
import string
from collections import Counter
from typing import Any

from rlscale.rewards.builtin import required_label
from rlscale.rewards.last_box import last_boxed
from rlscale.types import Sample

MAX_DAPO_CHARS = 300
"""Characters at the end of a response in which DAPO looks for the answer."""

_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_ARTICLES_BEFORE = re.compile(r"\ban? ")
_WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline", "mbox", "mathrm"))
_MATH = re.compile(r"\$(.*?)\$")
# Words and marks around a number that Minerva's comparison ignores (arXiv:2206.14858, appendix D.1).
_IGNORED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "sue", "points", "feet"),
    *("minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\ldots", r"\dots", r"\text{s}", r"\text{.}", r"\text{}^2", r"\text{}^3"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "<|im_end|>", "<|endoftext|>"),
)


def f1_reward(sample: Sample) -> float:
    """F1 score of the words of response and label, after SQuAD (arXiv:1606.05250).

    Case, punctuation, articles and repeated spaces are ignored. If one of the two is only `yes`, `no` or `noanswer`, as
    in HotpotQA, both must be the same.

    Raises:
        ValueError: there is no label, or it has no word: every answer would get 0.
    """
    label = required_label(sample)
    found, expected = _words(sample.answer), _words(label)
    if not expected:
        raise ValueError(f"the label must have a word that is no article, got {label!r}; use reward=exact_match")
    if found != expected and not _CLOSED_ANSWERS.isdisjoint((" ".join(found), " ".join(expected))):
        return 0.0
    num_common = (Counter(found) & Counter(expected)).total()
    # 2 P R / (P + R) with P = common / found and R = common / expected.
    return 2 * num_common / (len(found) + len(expected)) if num_common else 0.0


def dapo_reward(sample: Sample) -> dict[str, Any]:
    """`score` 1 if the last line `Answer: ...` is the integer of the label, else -1 (arXiv:2503.14476).

    Returns:
        `score`, `acc` (true or false) and `pred`, the answer that was read; `[INVALID]` without one.

    Raises:
        ValueError: there is no label, or it is no integer.
    """
    lines = _ANSWER_LINE.findall(sample.answer[-MAX_DAPO_CHARS:])
    return _compare_integers(lines[-1] if lines else None, sample)


def boxed_dapo_reward(sample: Sample) -> dict[str, Any]:
    r"""As `dapo_reward`, of the text in the last \boxed{...} instead of the last line."""
    return _compare_integers(last_boxed(sample.answer), sample)


def _compare_integers(answer: str | None, sample: Sample) -> dict[str, Any]:
    label = normalize_minerva(last_boxed(required_label(sample)) or required_label(sample))
    try:
        value = float(label)
        is_integer = value.is_integer()
    except ValueError:
        is_integer = False
    if not is_integer:
        raise ValueError(f"the label must be an integer, got {sample.prompt.label!r}; use reward=deepscaler")
    found = "[INVALID]" if answer is None else normalize_minerva(answer)
    # An integer label is compared as text: float would round a long one.
    is_right = found == (label if re.fullmatch(r"-?\d+", label) else str(int(value)))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": found}


def normalize_minerva(answer: str) -> str:
    """The answer without units, articles, spaces, LaTeX text commands and thousands separators."""
    text = answer.rsplit("=", 1)[-1]
    text = _ARTICLES_BEFORE.sub("", text).replace(".$", "$").replace(r"\$", "").replace("\\ ", "").replace(" ", "")
    for ignored in _IGNORED:
        text = text.replace(ignored, "")
    math = _MATH.search(text)
    if math is not None:
        text = math[1]
    for wrapper in _WRAPPERS:
        text = wrapper.sub(r"\1", text)
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).replace("$", "").strip()
    digits = text.replace(",", "")
    return digits if digits.removeprefix("-").isdigit() else text


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
