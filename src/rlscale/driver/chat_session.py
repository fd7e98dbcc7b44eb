"""Conversation of a person with a policy: streamed answers, and the tools of its experiment."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from rlscale.agents.tool_pool import ToolBox
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.errors import RenderError
from rlscale.renderers.conversation_tree import ConversationTree
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt, SamplingParams

_UNKNOWN = "\ufffd"  # shown for a part of a character; later tokens may complete it


class ChatEngine(Protocol):
    """The part of the embedded engine that a chat needs."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        """Yields the number of the answer, 0, and the answer so far."""
        ...


class ChatEventKind(StrEnum):
    """Kinds of events."""

    text = "text"  # a part of an answer
    end = "end"  # of an answer
    call = "call"  # of a tool
    result = "result"  # of a tool
    note = "note"  # a limit or an error


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatEvent:
    """Part of what happens after a message of the person."""

    kind: ChatEventKind
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatModel:
    """A model with its engine. `renderer` None: it has no chat template, and each message is a prompt by itself."""

    service: ChatEngine
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]  # without special tokens
    renderer: Renderer | None
    max_context_len: int
    max_turns: int = 16
    box: ToolBox | None = None
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=512))


class ChatSession:
    """The conversation. Tokens of earlier answers are kept as they were sampled, as in training.

    Example:
        session = ChatSession(model)
        async for event in session.send("What is 17 * 23?"):
            ...
    """

    def __init__(self, model: ChatModel) -> None:
        self._model, self._numbers = model, itertools.count()
        self._system = ""
        self.reset()

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self.messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        self._tree: ConversationTree | None = None
        if self._model.renderer is not None:
            prompt = Prompt(index=0, text="", token_ids=())
            self._tree = ConversationTree(Trajectory(id=0, group_index=0, prompt=prompt, seed=0), self._model.renderer)

    def set_system(self, text: str) -> None:
        """Sets the system message, and forgets all others."""
        self._system = text
        self.reset()

    async def send(self, text: str) -> AsyncIterator[ChatEvent]:
        """Answers a message. A conversation that is left before its end continues without the rest."""
        if self._tree is None:
            async for part, _ in self._stream(self._model.encode(text), stop_ids=()):
                yield part
            return
        start = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        for _ in range(self._model.max_turns):
            calls: Sequence[tuple[str, str]] = ()
            async for event in self._answer():
                if isinstance(event, ChatEvent):
                    yield event
                else:
                    calls = event
            if not calls or self._model.box is None:
                if self.messages[-1]["role"] != "assistant":
                    del self.messages[start:]  # no answer: the message was not sent
                return
            for name, arguments in calls:
                yield ChatEvent(kind=ChatEventKind.call, text=f"{name}({arguments})")
                result = await self._model.box.call(name, arguments)
                yield ChatEvent(kind=ChatEventKind.result, text=result.text)
                self.messages.append({"role": "tool", "name": name, "content": result.text})
        yield _note(f"the policy called tools {self._model.max_turns} times without an answer")

    async def _answer(self) -> AsyncIterator[ChatEvent | Sequence[tuple[str, str]]]:
        """The events of one answer, then its calls of tools."""
        assert self._tree is not None and self._model.renderer is not None
        tools = self._model.box.specs if self._model.box is not None else ()
        try:
            request = self._tree.prepare(self.messages, tools)
        except RenderError as error:
            yield _note(str(error))
            return
        renderer, answer = self._model.renderer, None

        def parse(output_ids: Sequence[int]) -> ParsedAnswer:
            return renderer.parse(output_ids, prompt_ids=request.token_ids, tools=request.tools)

        async for event, latest in self._stream(
            request.token_ids, stop_ids=renderer.stop_ids, parse=parse if tools else None
        ):
            answer = latest
            yield event
        if answer is None:
            return
        parsed = self._tree.add(request, _as_generation(answer))
        message = parsed.to_message()
        self.messages.append(message)
        if parsed.error is not None:
            yield _note(f"a tool call could not be parsed: {parsed.error}")
        yield [(call.name, call.arguments) for call in parsed.tool_calls]

    async def _stream(
        self,
        token_ids: Sequence[int],
        *,
        stop_ids: Sequence[int],
        parse: Callable[[Sequence[int]], ParsedAnswer] | None = None,
    ) -> AsyncIterator[tuple[ChatEvent, Answer | None]]:
        """Text of an answer as it grows, each part with the answer so far.

        Args:
            parse: finds the calls of tools, which are other events. None: the answer has none.
        """
        free = self._model.max_context_len - len(token_ids)
        params = self._model.params
        if free <= 0:
            note = f"the conversation fills the {self._model.max_context_len} tokens of the model; write /reset"
            yield _note(note), None
            return
        params = replace(
            params,
            max_new_tokens=min(free, params.max_new_tokens),
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stop_ids))),
        )
        shown, answer = 0, None
        request = GenerateRequest(rid=f"chat-{next(self._numbers)}", input_ids=tuple(token_ids), params=params)
        async for _, answer in self._model.service.stream(request):
            text = self._model.decode(answer.output_ids)
            if answer.finish_reason is None:
                text = text.rstrip(_UNKNOWN)
            if parse is not None:
                text = _without_calls(text, parse(answer.output_ids), is_whole=answer.finish_reason is not None)
            if len(text) > shown:
                yield ChatEvent(kind=ChatEventKind.text, text=text[shown:]), answer
                shown = len(text)
        yield ChatEvent(kind=ChatEventKind.end), answer
        if answer is not None and (answer.finish_reason or {}).get("type") == "length":
            yield _note(f"cut after {len(answer.output_ids)} tokens; --max-tokens sets the limit"), answer


def _without_calls(text: str, parsed: ParsedAnswer, *, is_whole: bool) -> str:
    """The text to show of an answer so far: that before a call. A call that cannot be parsed is text at the end."""
    if parsed.tool_calls or (parsed.error is not None and not is_whole):
        return parsed.content if text.startswith(parsed.content) else ""
    return text


def _note(text: str) -> ChatEvent:
    return ChatEvent(kind=ChatEventKind.note, text=text)


def _as_generation(answer: Answer) -> Generation:
    reason = str((answer.finish_reason or {}).get("type", "stop"))
    return Generation(
        output_ids=answer.output_ids,
        logprobs=[0.0] * len(answer.output_ids),
        weight_versions=[0] * len(answer.output_ids),
        finish_reason=reason if reason in ("stop", "length", "abort") else "stop",
        text="",
        engine="chat",
    )
