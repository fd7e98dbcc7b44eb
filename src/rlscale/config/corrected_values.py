"""Corrects values that resemble a value of the right type: `0,001`, `1,000`, `10**-4`, `1e-4;`, `bf16`."""

from __future__ import annotations

import re
from collections.abc import Callable

from rlscale.config.foreign_words import VALUE_WORDS

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_UNITS = r"(?:s|sec|secs|seconds?|min|minutes?|tokens?|steps?|samples?|prompts?|gpus?|mb|gb|f|x)"

_TRUE = ("enabled", "enable", "t", "si", "ja", "oui", "active")
_FALSE = ("disabled", "disable", "f", "none", "null", "never", "nein", "non")


def _power(base: float, exponent: float) -> float | None:
    """A power; None when it is too large for a float."""
    try:
        value = base**exponent
    except (OverflowError, ZeroDivisionError):
        return None
    return value if isinstance(value, float) else None


# Pattern of the whole text -> its value from the groups of the pattern.
_FORMS: tuple[tuple[str, Callable[[re.Match[str]], float | None]], ...] = (
    (rf"({_NUMBER})", lambda found: float(found[1])),
    (r"0x([0-9a-f]+)", lambda found: float(int(found[1], 16))),
    # Thousands before decimals: 1,000 is a count, while 0,001 has a zero in front of its only comma.
    (r"([1-9]\d{0,2}(?:[, ']\d{3})+)", lambda found: float(re.sub(r"[, ']", "", found[1]))),
    (r"([+-]?\d+,\d+(?:e[+-]?\d+)?)", lambda found: float(found[1].replace(",", "."))),
    (rf"({_NUMBER})%", lambda found: float(found[1]) / 100),
    (rf"({_NUMBER})(?:\*\*|\^)\(?([+-]?\d+)\)?", lambda found: _power(float(found[1]), float(found[2]))),
    (
        rf"({_NUMBER})[*x]10(?:\*\*|\^)?\(?([+-]?\d+)\)?",
        lambda found: None if (power := _power(10.0, float(found[2]))) is None else float(found[1]) * power,
    ),
    (rf"({_NUMBER})/({_NUMBER})", lambda found: float(found[1]) / float(found[2]) if float(found[2]) else None),
    (rf"({_NUMBER})[*x]({_NUMBER})", lambda found: float(found[1]) * float(found[2])),
    (r"(\d+)k", lambda found: float(found[1]) * 1024),
    (rf"({_NUMBER}){_UNITS}", lambda found: float(found[1])),
    (r"(?:lr|float|int)?\(({0})\)".replace("{0}", _NUMBER), lambda found: float(found[1])),
)


MAX_LEN = 100
"""Characters of a text that may stand for a number: the patterns need seconds for thousands of digits."""


def corrected_number(text: str, *, whole: bool) -> str | None:
    """The number that a text most likely stands for, as it is written in an override; None when there is none.

    Args:
        text: the value as it was typed.
        whole: whether it must be an integer.
    """
    if len(text) > MAX_LEN:
        return None
    # U+2212 is the minus sign of formatted texts.
    plain = text.replace("\u2212", "-").strip().lstrip("=:").strip(" ;,'\"`").lower()
    plain = plain if re.fullmatch(r"\d{1,3}( \d{3})+", plain) else plain.replace(" ", "")
    for pattern, value_of in _FORMS:
        found = re.fullmatch(pattern, plain)
        value = value_of(found) if found else None
        if value is None or abs(value) > 1e18:
            continue
        if value.is_integer() and (whole or abs(value) < 1e6):
            return str(int(value))
        if not whole:
            return f"{value:.12g}"
    return None


def corrected_bool(text: str) -> str | None:
    """`true` or `false` for a word that means it; None for any other word."""
    word = text.strip(" ;,.'\"").lower()
    if word in _TRUE or word in ("true", "yes", "on", "1"):
        return "true"
    return "false" if word in _FALSE or word in ("false", "no", "off", "0") else None


def corrected_choice(path: str, text: str) -> str | None:
    """The choice of a key that another project calls `text`; None for an unknown word."""
    words = VALUE_WORDS.get(path, {})
    return words.get(text.strip(" ;,'\"").lower())
