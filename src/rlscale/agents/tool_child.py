"""Process in which tools run: loads the tools and makes the calls that the run sends."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from rlscale.agents.content_parts import image_contents
from rlscale.agents.image_parameters import open_pictures
from rlscale.agents.load_tools import load_tools
from rlscale.agents.tool import Tool, ToolError, cut_text, result_text
from rlscale.images import Image
from rlscale.rewards.call_server import encode_error, serve_calls, to_error
from rlscale.rewards.reward_value import GradingError


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolsSpec:
    """The tools of a process, as it loads them."""

    paths: tuple[str, ...]  # as `agent.tools`
    is_async: bool  # only tools of this kind are called here
    max_chars: int  # of a result


def main(channel: int, crash_file: int, parent: int) -> None:
    """Serves until the run closes the channel; see `serve_calls`."""
    serve_calls(channel, crash_file, parent, ToolCalls)


class ToolCalls:
    """Calls of tools; see `CallHandler`."""

    max_cpu_s = None

    def __init__(self, spec: ToolsSpec) -> None:
        self._tools = {tool.name: tool for tool in load_tools(spec.paths)}
        self.is_async, self._max_chars = spec.is_async, spec.max_chars

    def open(self, payload: tuple[str, str, Sequence[Image]]) -> "_ToolCall":
        """A call; `payload` is the name of a tool, its arguments as JSON, and the images of the row."""
        name, arguments, images = payload
        return _ToolCall(self._tools[name], arguments, images, max_chars=self._max_chars)

    def receive(self, kind: str, *arguments: Any) -> None:
        """Tools get no messages but calls."""
        raise AssertionError(f"a tool must get calls only, got message {kind}")

    async def finish(self) -> None:
        """Tools hold nothing of an event loop."""

    def close(self) -> None:
        """Tools hold nothing that the process does not free."""


class _ToolCall:
    def __init__(self, tool: Tool, arguments: str, images: Sequence[Image], *, max_chars: int) -> None:
        self._tool, self._arguments, self._images, self._max_chars = tool, arguments, images, max_chars

    def run(self) -> Any:
        # An error for the policy is a value; any other exception is one of the tool.
        try:
            found = self._tool.run(self._arguments, open_pictures(self._images))
        except ToolError as error:
            return error
        return self._awaited(found) if isinstance(found, Awaitable) else found

    async def _awaited(self, found: Awaitable[Any]) -> Any:
        try:
            return await found
        except ToolError as error:
            return error

    def reply(self, found: Any) -> dict[str, Any]:
        try:
            if isinstance(found, GradingError):
                return encode_error(found)
            if isinstance(found, ToolError):
                return {"rejected": self._cut(str(found))}
            parts = image_contents(found, cut=self._cut)
            return {"text": self._cut(result_text(found))} if parts is None else {"parts": parts}
        except Exception as error:  # the value is the user's: its methods may raise anything
            return encode_error(to_error(error))

    def _cut(self, text: str) -> str:
        return cut_text(text, self._max_chars)
