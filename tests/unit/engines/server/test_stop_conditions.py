"""Finish reasons, and the text of answers."""

from typing import Any

import pytest

from rlscale.engines.server.stop_conditions import answer_text, find_finish_reason, may_become_stop_string
from rlscale.types import SamplingParams

BYTES = (
    "n\N{LATIN SMALL LETTER A WITH DIAERESIS}h".encode()
)  # one token for each byte: the middle two are one character
SPECIAL = 256


def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
    """One token for each byte, and a special one."""
    text, plain = "", list[int]()
    for i in [*ids, None]:
        if i is not None and i < SPECIAL:
            plain.append(i)
            continue
        text += bytes(plain).decode(errors="replace")
        plain = []
        text += "" if i is None or skip_special_tokens else "<end>"
    return text


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 9, **given})


def end(text: str, stop_ids: frozenset[int] = frozenset(), **given: Any) -> Any:
    return find_finish_reason(list(text.encode()), params(**given), stop_ids, decode)


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("abc", {}, None),
        ("abc", {"max_new_tokens": 3}, {"type": "length", "length": 3}),
        ("abc", {"stop": ("bc",)}, {"type": "stop", "matched": "bc"}),
        ("abc", {"stop": ("x", "c", "bc")}, {"type": "stop", "matched": "c"}),
        ("abc", {"stop": ("abcd",)}, None),
        # As in SGLang a string has priority over a token, and a token over the length.
        ("abc", {"stop": ("c",), "max_new_tokens": 3}, {"type": "stop", "matched": "c"}),
    ],
)
def test_finish_reason(text: str, given: dict[str, Any], expected: Any) -> None:
    assert end(text, **given) == expected


def test_stop_token_and_string_together() -> None:
    ids = frozenset({ord("c")})
    assert end("abc", ids, max_new_tokens=3) == {"type": "stop", "matched": ord("c")}
    assert end("abc", ids, stop=("bc",)) == {"type": "stop", "matched": "bc"}


def test_long_stop_string_of_many_tokens_is_found_whole() -> None:
    stop = "0123456789" * 3
    assert end("abc" + stop, stop=(stop,), max_new_tokens=99) == {"type": "stop", "matched": stop}
    assert end("abc" + stop[:-1], stop=(stop,), max_new_tokens=99) is None


def test_special_token_can_complete_a_string() -> None:
    ids = [*b"ab", SPECIAL]
    finish = find_finish_reason(ids, params(stop=("b<end>",)), frozenset(), decode)
    assert finish == {"type": "stop", "matched": "b<end>"}
    assert answer_text(ids, finish, params(skip_special_tokens=False), decode) == "a"
    assert answer_text(ids, finish, params(), decode) == "ab"


def test_text_is_cut_where_the_string_first_occurs() -> None:
    finish = {"type": "stop", "matched": "b"}
    assert answer_text(list(b"aabcb"), finish, params(), decode) == "aa"
    assert answer_text(list(b"aabcb"), finish, params(no_stop_trim=True), decode) == "aab"


def test_stop_token_is_not_text() -> None:
    finish = {"type": "stop", "matched": SPECIAL}
    assert answer_text([*b"ab", SPECIAL], finish, params(skip_special_tokens=False), decode) == "ab"
    shown = params(skip_special_tokens=False, no_stop_trim=True)
    assert answer_text([*b"ab", SPECIAL], finish, shown, decode) == "ab<end>"
    assert answer_text([*b"ab"], {"type": "length", "length": 2}, params(), decode) == "ab"


def test_an_incomplete_character_is_only_in_the_final_text() -> None:
    texts = [answer_text(list(BYTES[:num]), None, params(), decode) for num in range(len(BYTES) + 1)]
    assert texts == ["", "n", "n", BYTES[:3].decode(), BYTES.decode()]
    half = answer_text(list(BYTES[:2]), {"type": "length", "length": 2}, params(), decode)
    assert half == "n\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("text", "undecided"), [("xa", True), ("xab", True), ("xb", False), ("", False), ("x", False)])
def test_the_beginning_of_a_stop_string_is_recognized(text: str, undecided: bool) -> None:
    assert may_become_stop_string(list(text.encode()), params(stop=("abc",)), decode) is undecided
