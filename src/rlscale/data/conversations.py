"""Conversations for supervised training: which text is the prompt, and which of what follows is learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from rlscale.config import LossMaskType
from rlscale.types import Turn

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages as the chat template writes them; with true, the opening of an answer behind them."""

ASSISTANT = "assistant"
THINKING = "<think>\n"
_ASKED = ({"role": "user", "content": "?"},)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A rendered conversation up to its last answer: `prompt` and the texts of `turns` laid end to end."""

    prompt: str
    turns: tuple[Turn, ...]


def render_conversation(
    messages: Sequence[Message], *, kind: LossMaskType, render: Render, end_token: str
) -> Conversation:
    """Divides a conversation into what is read and what is learned: the answers, each with the token that ends it.

    Args:
        messages: of any roles; the first one is no answer, and what follows the last one is left out.
        kind: the family of the chat template.
        render: applies the chat template.
        end_token: ends a response of the model.

    Raises:
        ValueError: there is no answer, or nothing before it, or the template writes conversations otherwise than
            `kind` says.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not places or places[0] == 0:
        raise ValueError("a conversation must have an answer (role assistant) and a message before it")
    found = _BY_KIND[kind](messages[: places[-1] + 1], render)
    last = found.turns[-1]
    if last.text.endswith(end_token):
        return found
    return replace(found, turns=(*found.turns[:-1], Turn(last.text + end_token, True)))


def _as_a_whole(messages: Sequence[Message], render: Render) -> Conversation:
    """Templates that write a message the same whatever follows it: answers lie in the rendered whole."""
    whole = render(messages, False)
    turns, end = [], 0
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = render(messages[:place], True), render(messages[: place + 1], False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                f"the chat template must write answer {place + 1} the same whatever follows it, and open it as it asks "
                "for one; choose data.loss_mask_type=qwen3 or distill_qwen"
            )
        turns += [Turn(whole[end : len(before)], False), Turn(after[len(before) :].rstrip(), True)]
        end = len(after.rstrip())
    return Conversation(prompt=turns[0].text, turns=tuple(turns[1:]))


def _one_by_one(messages: Sequence[Message], render: Render) -> Conversation:
    """Templates that drop the thinking of earlier answers: each answer is written as the last one of a conversation."""
    opened, asked = render(_ASKED, True), render(_ASKED, False)
    texts: list[Turn] = []
    behind = ""  # what the template writes behind the end of an answer
    for is_answer, run in groupby(messages, key=lambda message: message["role"] == ASSISTANT):
        if not is_answer:
            several = list(run)
            text = _after(render([*_ASKED, *several], True), asked) if texts else render(several, True)
            texts.append(Turn(behind + text, False))
            continue
        for number, message in enumerate(run):
            if number:
                texts.append(Turn(behind + _after(opened, asked), False))
            text = _after(render([*_ASKED, message], False), opened)
            texts.append(Turn(text.rstrip(), True))
            behind = text[len(text.rstrip()) :]
    return Conversation(prompt=texts[0].text, turns=tuple(texts[1:]))


def _only_the_last(messages: Sequence[Message], render: Render) -> Conversation:
    """Templates whose question already opens the thinking: everything before the last answer is read."""
    prompt, answer = render(messages[:-1], True), str(messages[-1]["content"])
    if prompt.endswith(THINKING):
        answer = answer.removeprefix(THINKING)
    return Conversation(prompt=prompt, turns=(Turn(answer, True),))


def _after(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise ValueError(
            "the chat template must write a message the same whatever follows it, but for thinking; choose "
            "data.loss_mask_type=distill_qwen"
        )
    return text[len(beginning) :]


_BY_KIND: Mapping[LossMaskType, Callable[[Sequence[Message], Render], Conversation]] = MappingProxyType(
    {
        LossMaskType.qwen: _as_a_whole,
        LossMaskType.qwen3: _one_by_one,
        LossMaskType.distill_qwen: _only_the_last,
    }
)
