"""Calls of tools in processes, and what becomes of those that fail."""

import asyncio
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from rlscale.agents.content_parts import NO_IMAGES
from rlscale.agents.tool import Tool
from rlscale.agents.tool_child import ToolsSpec
from rlscale.config.groups.agent import AgentConfig, OnToolError
from rlscale.images import Image
from rlscale.renderers.renderer import ToolSpec
from rlscale.renderers.run_images import RunImages
from rlscale.rewards.call_pool import CallPool, PoolLimits, Reply
from rlscale.rewards.call_process import ChildProgram
from rlscale.rewards.call_server import decode_error
from rlscale.rewards.reward_value import GradingError
from rlscale.types import FailureCause

RETRY_BACKOFF_S = 0.2
"""Wait before the first further call of a tool that failed; it doubles."""

_PROGRAM = ChildProgram(module="rlscale.agents.tool_child", name="a tool", timeout_key="agent.tool_timeout_s")


Owner: TypeAlias = Hashable
"""An attempt at a trajectory, for tools that keep something from call to call."""

SHARED: Owner = None
"""Owner of what all trajectories share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of one call, for the policy."""

    text: str
    is_rejected: bool = False  # the call itself was wrong: `text` says why
    error: str | None = None  # why the tool failed, one line; None: it did not
    cause: FailureCause = FailureCause.tool  # of an error
    num_calls: int = 1  # with those that were repeated
    seconds: float = 0.0
    parts: tuple[Mapping[str, str], ...] = ()  # texts and images; empty: the result is `text`
    images: tuple[Image, ...] = ()  # of `parts`, which name them by hash

    @property
    def content(self) -> Any:
        """The content of the message of the tool."""
        return list(self.parts) or self.text


class ToolCaller(Protocol):
    """Tools of one source, e.g. the functions of the config."""

    keeps_state: bool  # of an attempt, from call to call until `release`

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Sequence[Image] = ()) -> ToolResult:
        """Calls a tool of `specs` once. Never raises what a tool raises.

        Args:
            images: of the row, for tools that take them.
        """
        ...

    async def release(self, owner: Owner) -> None:
        """Frees what the calls of an attempt hold. Does not wait for user code."""
        ...

    async def close(self, *, wait: bool) -> None:
        """Ends all processes and connections, at once if not `wait`."""
        ...


class FunctionTools:
    """Functions with the decorator `tool`: plain ones and coroutines, in separate processes.

    Args:
        tools: loaded from `paths`, for their schemas; processes load them again.
    """

    keeps_state = False

    def __init__(self, tools: Sequence[Tool], paths: Sequence[str], config: AgentConfig) -> None:
        self.specs = [tool.spec for tool in tools]
        limits = PoolLimits(max_workers=config.tool_processes, timeout_s=config.tool_timeout_s)
        # A coroutine would wait for a plain tool in the same process, which blocks its event loop.
        pools = {
            is_async: CallPool(
                _PROGRAM, ToolsSpec(paths=tuple(paths), is_async=is_async, max_chars=config.max_tool_chars), limits
            )
            for is_async in {tool.is_async for tool in tools}
        }
        self._pools = pools
        self._pool_of = {tool.name: pools[tool.is_async] for tool in tools}
        self._takes_images = {tool.name for tool in tools if tool.image_parameters}

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Sequence[Image] = ()) -> ToolResult:
        """See ToolCaller."""
        taken = tuple(images) if name in self._takes_images else ()
        return _as_result(await self._pool_of[name].call((name, arguments, taken)))

    async def release(self, owner: Owner) -> None:
        """Functions keep nothing for an attempt."""

    async def close(self, *, wait: bool) -> None:
        """Ends the processes; see `CallPool`."""
        for pool in self._pools.values():
            pool.close(wait=wait)


class ToolBox:
    """All tools of a run by name, with the rules for calls that fail.

    Example:
        box = ToolBox([FunctionTools(tools, paths, config.agent)], config.agent)
        result = await box.call("add", '{"a": 1, "b": 2}')
        await box.close(wait=True)
    """

    def __init__(self, callers: Sequence[ToolCaller], config: AgentConfig, *, images: RunImages | None = None) -> None:
        """Args:
        images: of a run whose model reads images.
        """
        self._callers, self._images = list(callers), images
        self._caller_of: Mapping[str, ToolCaller] = {
            spec["function"]["name"]: caller for caller in callers for spec in caller.specs
        }
        self.specs: tuple[ToolSpec, ...] = tuple(spec for caller in callers for spec in caller.specs)
        self._on_error = config.on_tool_error
        self._max_calls = 1 + (config.tool_retries if config.on_tool_error == OnToolError.retry else 0)

    async def call(
        self, name: str, arguments: str, owner: Owner = SHARED, *, images: Sequence[Image] = ()
    ) -> ToolResult:
        """The result of a call. With an `error` the trajectory has failed, unless that is a result for the policy.

        Args:
            images: of the row, for tools that take them.
        """
        caller, began_s = self._caller_of.get(name), time.monotonic()
        if caller is None:
            known = ", ".join(self._caller_of)
            return ToolResult(text=f"Error: there is no tool {name[:80]!r}; the tools are {known}", is_rejected=True)
        # Wrong calls are not repeated: the same arguments are wrong again.
        for number in range(1, self._max_calls + 1):
            if number > 1:
                await asyncio.sleep(RETRY_BACKOFF_S * 2 ** (number - 2))
            result = await self._opened(await caller.call(name, arguments, owner, images=images))
            if result.error is None:
                break
        return replace(result, num_calls=number, seconds=time.monotonic() - began_s)

    async def _opened(self, result: ToolResult) -> ToolResult:
        """The result with its images opened; a failure if the model cannot read them."""
        if not result.parts:
            return result
        if self._images is None:
            return _failed(GradingError(cause=NO_IMAGES))
        try:
            (message,), images = await self._images.open_in_thread([{"content": list(result.parts)}])
        except ValueError as error:
            return _failed(GradingError(cause=" ".join(str(error).split())))
        return replace(result, parts=tuple(message["content"]), images=tuple(images))

    def keeps_state(self, name: str) -> bool:
        """Whether calls of this tool depend on earlier ones of the same attempt."""
        caller = self._caller_of.get(name)
        return caller is not None and caller.keeps_state

    @property
    def fails_trajectories(self) -> bool:
        """Whether a tool that failed ends the trajectory."""
        return self._on_error != OnToolError.message

    async def release(self, owner: Owner) -> None:
        """Frees what the calls of an attempt hold."""
        for caller in self._callers:
            await caller.release(owner)

    async def close(self, *, wait: bool) -> None:
        """Ends all processes and connections, at once if not `wait`."""
        for caller in self._callers:
            await caller.close(wait=wait)


def _as_result(reply: Reply) -> ToolResult:
    if isinstance(reply, GradingError):
        return _failed(reply)
    if isinstance(text := reply.get("text"), str):
        return ToolResult(text=text)
    if isinstance(parts := reply.get("parts"), list):
        return ToolResult(text="", parts=tuple(parts))
    if isinstance(text := reply.get("rejected"), str):
        return ToolResult(text=f"Error: {text}", is_rejected=True)
    try:
        return _failed(decode_error(reply))
    except KeyError:  # user code wrote to the channel of its process
        return _failed(GradingError(cause="its process sent a malformed reply"))


def _failed(error: GradingError) -> ToolResult:
    # The policy gets no paths of files.
    return ToolResult(text=f"Error: the tool failed: {error.cause}", error=str(error))
