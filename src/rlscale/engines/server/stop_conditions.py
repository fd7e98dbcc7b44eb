"""Finish reasons and the text of an answer, as in SGLang."""

from collections.abc import Sequence
from typing import Any, Protocol

from rlscale.types import SamplingParams

# The first bytes of a multi-byte character decode to this.
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Decode(Protocol):
    """Token ids to text."""

    def __call__(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


def find_finish_reason(ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int], decode: Decode) -> Any:
    """SGLang's `finish_reason` if an answer ends with its last token; None if it continues.

    A stop string has priority over a stop token, and a stop token over the length. Tokens up to the one that completes
    the string are kept.
    """
    if params.stop:
        tail = _tail(ids, params.stop, decode)
        for string in params.stop:
            if string in tail:
                return {"type": "stop", "matched": string}
    if ids[-1] in stop_ids:
        return {"type": "stop", "matched": ids[-1]}
    if len(ids) >= params.max_new_tokens:
        return {"type": "length", "length": len(ids)}
    return None


def may_become_stop_string(ids: Sequence[int], params: SamplingParams, decode: Decode) -> bool:
    """Reports whether the text ends with the beginning of a stop string, so that a stream must not send it yet."""
    if not params.stop or not ids:
        return False
    tail = _tail(ids, params.stop, decode)
    return any(tail.endswith(string[:num]) for string in params.stop for num in range(1, len(string) + 1))


def answer_text(ids: list[int], finish: dict[str, Any] | None, params: SamplingParams, decode: Decode) -> str:
    """The text of an answer, without the stop string or token that ended it unless `no_stop_trim`.

    While the answer grows (`finish` is None) an incomplete character at its end is omitted: the text only grows.
    """
    matched = None if finish is None else finish.get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = decode(ids, skip_special_tokens=params.skip_special_tokens)
    if finish is None:
        return text.rstrip(INCOMPLETE_CHARACTER)
    # A special token can complete a stop string; it is skipped in the text, which then lacks the string.
    start = text.find(matched) if isinstance(matched, str) else -1
    if not isinstance(matched, str) or start < 0:
        return text
    return text[: start + len(matched)] if params.no_stop_trim else text[:start]


def _tail(ids: Sequence[int], strings: tuple[str, ...], decode: Decode) -> str:
    # A token has at least one byte, so a string of N bytes that ends in the last token starts in the last N tokens.
    max_bytes = max(len(string.encode()) for string in strings)
    return decode(list(ids[-(max_bytes + 1) :]), skip_special_tokens=False)
