"""Conversations for supervised training: splits them into the prompt and turns in or out of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from rlscale.config import LossMaskType
from rlscale.data.message_checks import ASSISTANT, STEP_MASK, is_learned
from rlscale.types import ConversationPart

Message = Mapping[str, Any]
Messages = Sequence[Message]
Render = Callable[[Messages, bool], str]
"""Applies the chat template to messages; with True it adds the generation prompt."""

THINKING, _THINK_TAG = "<think>\n", "<think>"
_QUESTION = ({"role": "user", "content": "?"},)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A rendered conversation up to its last answer: the concatenation of `prompt` and the texts of `turns`."""

    prompt: str
    turns: tuple[ConversationPart, ...]


def render_conversation(
    messages: Sequence[Message], *, kind: LossMaskType, render: Render, end_token: str
) -> Conversation:
    """Splits a conversation into context and learned turns: the answers, each with its end token.

    Args:
        messages: of any roles; the first is no answer, and messages after the last answer are ignored.
        kind: the family of the chat template.
        render: applies the chat template.
        end_token: end token of the model.

    Raises:
        ValueError: there is no answer, or no message before it, or the template does not match `kind`.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if places and not any(is_learned(messages[place]) for place in places):
        raise ValueError(f"a conversation must have an answer in the loss; {STEP_MASK} is 0 for every answer")
    if not places or places[0] == 0:
        raise ValueError("a conversation must have an answer (role assistant) and a message before it")
    found = _BY_KIND[kind](messages[: places[-1] + 1], render, end_token)
    # Some templates omit the end token of the last answer, which the model must learn to generate.
    last = found.turns[-1]
    if last.text.endswith(end_token):
        return found
    return replace(found, turns=(*found.turns[:-1], ConversationPart(last.text + end_token, last.is_learned)))


def _split_whole(messages: Sequence[Message], render: Render, end_token: str) -> Conversation:
    """For templates that render a message independently of later ones: finds the answers in the rendered whole."""
    whole = render(messages, False)
    turns, end = [], 0
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        # The answer is the text between the generation prompt and the end of the conversation up to it.
        before, after = render(messages[:place], True), render(messages[: place + 1], False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                f"the chat template must render answer {place + 1} independently of later messages and start it with "
                "the generation prompt; set data.loss_mask_type=qwen3 or distill_qwen"
            )
        turns += [
            ConversationPart(whole[end : len(before)], False),
            ConversationPart(after[len(before) :].rstrip(), is_learned(message)),
        ]
        end = len(after.rstrip())
    return Conversation(prompt=turns[0].text, turns=tuple(turns[1:]))


def _render_each(messages: Sequence[Message], render: Render, end_token: str) -> Conversation:
    """For templates that drop the thinking of earlier answers: renders each answer as the last of a conversation."""
    # Rendered after a dummy question, whose text is then removed: the template treats the message as the last one.
    opened, closed = render(_QUESTION, True), render(_QUESTION, False)
    texts: list[ConversationPart] = []
    suffix = ""  # rendered text after the end of an answer
    for is_answer, run in groupby(messages, key=lambda message: message["role"] == ASSISTANT):
        if not is_answer:
            several = list(run)
            text = _after(render([*_QUESTION, *several], True), closed) if texts else render(several, True)
            texts.append(ConversationPart(suffix + text, False))
            continue
        for number, message in enumerate(run):
            if number:
                texts.append(ConversationPart(suffix + _after(opened, closed), False))
            text = _after(render([*_QUESTION, message], False), opened)
            texts.append(ConversationPart(text.rstrip(), is_learned(message)))
            suffix = text[len(text.rstrip()) :]
    return Conversation(prompt=texts[0].text, turns=tuple(texts[1:]))


def _find_answers(messages: Sequence[Message], render: Render, end_token: str) -> Conversation:
    """For templates that open the thinking of the last answer only: finds the answers in the text of the whole."""
    whole = render(messages, False)
    header = _after(render(_QUESTION, True), render(_QUESTION, False)).partition(_THINK_TAG)[0]
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not header or whole.count(header) != len(answers):
        raise ValueError(
            f"the chat template must start each of the {len(answers)} answers, and nothing else, with the generation "
            f"prompt {header!r}, got {whole.count(header) if header else 0} of it; set data.loss_mask_type=qwen3"
        )
    turns, end = [], 0
    for message in answers:
        start = whole.index(header, end) + len(header)
        # The generation prompt opens the thinking, so that the model does not learn to.
        start += len(THINKING) if whole.startswith(THINKING, start) else 0
        turns.append(ConversationPart(whole[end:start], False))
        found = whole.find(end_token, start)
        end = len(whole.rstrip()) if found < 0 else found + len(end_token)
        turns.append(ConversationPart(whole[start:end], is_learned(message)))
    return Conversation(prompt=turns[0].text, turns=tuple(turns[1:]))


def _last_answer(messages: Sequence[Message], render: Render, end_token: str) -> Conversation:
    """For templates whose generation prompt opens the thinking: everything before the last answer is context."""
    if not is_learned(messages[-1]):
        raise ValueError(
            f"the last answer of a conversation must be in the loss, got {STEP_MASK}=0; remove the row, or set "
            "data.loss_mask_type=qwen3"
        )
    prompt, answer = render(messages[:-1], True), str(messages[-1]["content"])
    # The prompt already contains the opening tag, so the answer must not repeat it.
    if prompt.endswith(THINKING):
        answer = answer.removeprefix(THINKING)
    return Conversation(prompt=prompt, turns=(ConversationPart(answer, True),))


def _after(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise ValueError(
            "the chat template must render a message independently of later ones, except for thinking; set "
            "data.loss_mask_type=distill_qwen"
        )
    return text[len(beginning) :]


_BY_KIND: Mapping[LossMaskType, Callable[[Sequence[Message], Render, str], Conversation]] = MappingProxyType(
    {
        LossMaskType.qwen: _split_whole,
        LossMaskType.qwen3: _render_each,
        LossMaskType.qwen3_5: _find_answers,
        LossMaskType.distill_qwen: _last_answer,
    }
)
