"""A renderer of a small test format: every id from 2 to 96 is one printable character.

    97 <role> text 98 ... 97 <assistant> | sampled ids, which a stop id (98, or 1 of the fake engine) ends

`calls_tools` makes each answer to a request with tools a call of the first tool, so that an engine without a model
can write calls, too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.errors import RenderError
from rlscale.gateway.codec import Codec
from rlscale.renderers.conversation_tree import message_text
from rlscale.renderers.renderer import Message, ParsedAnswer, ToolCall, ToolSpec

BEGIN, END, ENGINE_END = 97, 98, 1
FIRST, LAST = 2, 96
ROLES = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
VOCAB_SIZE = 100


def encode(text: str) -> list[int]:
    return [FIRST + (ord(each) - 32) % (LAST - FIRST + 1) for each in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(32 + each - FIRST) if FIRST <= each <= LAST else "" for each in ids)


@dataclass(frozen=True)
class CharacterRenderer:
    """See the module's docstring. With `bridges` false every request has its own prompt."""

    calls_tools: bool = False
    bridges: bool = True
    num_calls: int = 1
    name: str = "characters"
    stop_ids: tuple[int, ...] = (END, ENGINE_END)
    prefix_stable: bool = False

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        ids = encode(json.dumps([each["function"]["name"] for each in tools])) if tools else []
        for message in messages:
            ids += self._message(message)
        return [*ids, BEGIN, *encode("a")] if add_generation_prompt else ids

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        text = decode(output_ids)
        if not (self.calls_tools and tools):
            return ParsedAnswer(content=text)
        name = tools[0]["function"]["name"]
        call = ToolCall(name=name, arguments=json.dumps({"text": text}))
        return ParsedAnswer(content="", tool_calls=(call,) * self.num_calls)

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> list[int] | None:
        if not self.bridges or any(each["role"] not in ("user", "tool") for each in new_messages):
            return None
        ids = list(previous_ids)
        if ids[-1] not in self.stop_ids:
            ids.append(END)
        for message in new_messages:
            ids += self._message(message)
        return [*ids, BEGIN, *encode("a")]

    def _message(self, message: Message) -> list[int]:
        if message["role"] not in ROLES:
            raise RenderError(f"role must be one of {', '.join(ROLES)}, got {message['role']}")
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        return [BEGIN, *encode(ROLES[message["role"]] + message_text(message.get("content")) + calls), END]


def build_codec(**options: bool) -> Codec:
    return Codec(renderer=CharacterRenderer(**options), decode=decode)
