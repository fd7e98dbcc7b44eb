"""The tool `python`: runs a program that the policy wrote in a sandbox of the config; `agent.tools` names it.

rlscale-train ... agent.tools=[rlscale.agents.sandbox_tool:python] sandbox.kind=subprocess
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from rlscale.agents.tool import Tool, ToolError, cut_text, tool
from rlscale.agents.tool_pool import SHARED, Owner, ToolResult
from rlscale.config.groups.sandbox import SandboxConfig
from rlscale.errors import SandboxError
from rlscale.images import Image
from rlscale.sandboxes.open_sandboxes import open_pool
from rlscale.sandboxes.python_tool import run_python
from rlscale.sandboxes.sandbox import Sandbox
from rlscale.sandboxes.sandbox_pool import SandboxPool
from rlscale.types import FailureCause


@tool
def python(code: str) -> str:
    """Runs a Python program and returns what it prints, or its error.

    Args:
        code: the program; it prints its result.
    """
    raise ToolError("this tool runs in a sandbox; set sandbox.kind")


def needs_sandbox(each: Tool) -> bool:
    """Whether a tool runs in a sandbox, and not in a process of the run."""
    return each is python


class SandboxTools:
    """A `ToolCaller` of the tool `python`. An attempt has one sandbox, whose files stay until `release`.

    Args:
        max_chars: of a result.
        pool: None: the sandboxes of the config.
    """

    keeps_state = True

    def __init__(self, config: SandboxConfig, *, max_chars: int, pool: SandboxPool | None = None) -> None:
        self.specs = [python.spec]
        self._pool = pool or open_pool(config)
        self._max_chars = max_chars
        self._leases: dict[Owner, tuple[AbstractAsyncContextManager[Sandbox], Sandbox]] = {}
        self._opening = asyncio.Lock()

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Sequence[Image] = ()) -> ToolResult:
        """See `ToolCaller`. Whatever the program does is a result; only the sandbox itself fails."""
        try:
            code = python.parse(arguments)["code"]
        except ToolError as error:
            return ToolResult(text=f"Error: {error}", is_rejected=True)
        try:
            if owner == SHARED:
                async with self._pool.lease() as sandbox:
                    text = await run_python(sandbox, code)
            else:
                text = await run_python(await self._sandbox_of(owner), code)
        except SandboxError as error:
            await self.release(owner)
            return ToolResult(text="Error: the sandbox failed", error=str(error), cause=FailureCause.sandbox)
        return ToolResult(text=cut_text(text, self._max_chars))

    async def release(self, owner: Owner) -> None:
        """See `ToolCaller`."""
        if (found := self._leases.pop(owner, None)) is not None:
            await found[0].__aexit__(None, None, None)

    async def close(self, *, wait: bool) -> None:
        """Stops all sandboxes."""
        for owner in list(self._leases):
            await self.release(owner)
        await self._pool.close()

    async def _sandbox_of(self, owner: Owner) -> Sandbox:
        # One at a time: calls of one answer run at the same time.
        async with self._opening:
            if owner not in self._leases:
                lease = self._pool.lease()
                self._leases[owner] = (lease, await lease.__aenter__())
            return self._leases[owner][1]
