"""Where an answer ends and what of it becomes text, as SGLang does both."""

from collections.abc import Sequence
from typing import Any, Protocol

from rlscale.types import SamplingParams

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what half of a multi-byte character decodes to


class Decode(Protocol):
    """Token ids to text."""

    def __call__(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


def find_end(ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int], decode: Decode) -> Any:
    """Why an answer ends with its last token, as SGLang's `finish_reason`; None when it goes on.

    A stop string wins over a stop token, and that over the length. Tokens up to the one that completes the string stay.
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


def is_undecided(ids: Sequence[int], params: SamplingParams, decode: Decode) -> bool:
    """Whether the text so far ends in what may become a stop string, so that a stream must not show it yet."""
    if not params.stop or not ids:
        return False
    tail = _tail(ids, params.stop, decode)
    return any(tail.endswith(string[:num]) for string in params.stop for num in range(1, len(string) + 1))


def answer_text(ids: list[int], finish: dict[str, Any] | None, params: SamplingParams, decode: Decode) -> str:
    """The text of an answer; what stopped it is cut off unless `no_stop_trim`.

    While the answer grows (`finish` is None) half a character at its end is left out, so that it only ever gets longer.
    """
    matched = None if finish is None else finish.get("matched")
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = decode(ids, skip_special_tokens=params.skip_special_tokens)
    if finish is None:
        return text.rstrip(UNFINISHED)
    # A special token can complete a string that is then not in the text.
    start = text.find(matched) if isinstance(matched, str) else -1
    if not isinstance(matched, str) or start < 0:
        return text
    return text[: start + len(matched)] if params.no_stop_trim else text[:start]


def _tail(ids: Sequence[int], strings: tuple[str, ...], decode: Decode) -> str:
    # A token has at least one byte, so that no string that ends in the last token begins before this.
    longest = max(len(string.encode()) for string in strings)
    return decode(list(ids[-(longest + 1) :]), skip_special_tokens=False)
