"""The seam between messages and token ids.

    messages, tools ── render ──> ids ── engine ──> sampled ids ── parse ──> message
                        previous ids, new messages ── bridge ──> ids of the next request, or None

A bridge keeps every sampled token. A renderer that cannot extend the ids exactly returns None, and the trajectory
forks: tokens are never spliced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A message in the form of OpenAI's Chat Completions: `role` (system, user, assistant, tool), `content` (a text, or
None with tool calls), and `reasoning_content`, `tool_calls`, `tool_call_id`, `name` where they apply."""

ToolSpec: TypeAlias = Mapping[str, Any]
"""A tool in the form of Chat Completions: `{"type": "function", "function": {name, description, parameters}}`;
`parameters` is a JSON schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that the model wrote."""

    name: str
    arguments: str  # JSON, as the model wrote it: it may be invalid
    id: str = ""  # by the model's format; "": the format has none


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """The message that sampled ids contain.

    Example:
        ParsedAnswer(content="", tool_calls=(ToolCall(name="add", arguments='{"a": 1, "b": 2}'),))
    """

    content: str
    reasoning: str | None = None  # None: the answer has none
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None  # why a tool call could not be parsed, one line; its text is in `content`

    def to_message(self) -> dict[str, Any]:
        """The assistant's message of Chat Completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.tool_calls)
            ]
        return message


class Renderer(Protocol):
    """Messages to ids and back, for the chat template of one tokenizer. Calls may come from several threads."""

    @property
    def name(self) -> str:
        """Name of the format, e.g. `qwen3`."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def prefix_stable(self) -> bool:
        """Whether the ids of a conversation always begin with those of the same conversation without its last messages:
        then rendering and bridging are equal."""
        ...

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole conversation.

        Raises:
            RenderError: the template cannot render these messages, e.g. an unknown role.
        """
        ...

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        """The message in sampled ids, which may end without a stop id. Never raises for what a model writes.

        Args:
            prompt_ids: that the ids follow; a prompt may have opened the reasoning.
        """
        ...

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> list[int] | None:
        """Ids of the next request: `previous_ids` unchanged, then the new messages and the generation prompt.

        Args:
            previous_ids: prompt and answer of the request before, sampled stop id included where there is one.
            new_messages: that follow the answer: of the roles tool and user.

        Returns:
            A list that begins with `previous_ids`; None: the template cannot append these messages.
        """
        ...
