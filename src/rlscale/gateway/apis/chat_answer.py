"""An answer in the form that all chat APIs are rendered from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlscale.renderers.renderer import ParsedAnswer
from rlscale.types import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of the `n` answers of a request.

    Attributes:
        answer: as the client gets it: without the stop string, and with an id for each tool call.
        tokens: text of each sampled token; empty unless the request wants logprobs.
        stop: the string that ended it; None: none did.
    """

    answer: ParsedAnswer
    generation: Generation
    tokens: tuple[str, ...] = ()
    stop: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether its tokens ran out, or the server aborted it: the model did not end it."""
        return self.generation.finish_reason in ("length", "abort")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """The answers to one request.

    Attributes:
        key: part of the ids of the response and of its items; the same whenever this answer is sent.
        created_s: seconds since the epoch.
    """

    key: str
    created_s: int
    model: str
    num_prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.generation.output_ids) for choice in self.choices)


def shown_answer(answer: ParsedAnswer, *, key: str, stop: Sequence[str] = ()) -> tuple[ParsedAnswer, str | None]:
    """An answer as the client gets it, and the stop string that ended it.

    Engines return the tokens of a stop string, chat APIs do not return its text. Tool calls of formats without ids
    get one that is unique in the session.
    """
    calls = tuple(
        call if call.id else replace(call, id=f"call_{key}_{number}") for number, call in enumerate(answer.tool_calls)
    )
    # The earliest one: a string may be a part of another.
    ends = [(answer.content.find(each), each) for each in stop if each in answer.content]
    if not ends:
        return replace(answer, tool_calls=calls), None
    end, found = min(ends)
    return replace(answer, content=answer.content[:end], tool_calls=calls), found


def token_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """The sampled tokens with their logprobs. An alternative is never returned: none was recorded."""
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.generation.logprobs, strict=True)
    ]


def pieces(text: str, size: int = 48) -> list[str]:
    """The parts of a text that a stream sends one after the other."""
    return [text[start : start + size] for start in range(0, len(text), size)]
