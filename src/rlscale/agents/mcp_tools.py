"""Tools of MCP servers: a command that is started, or the URL of one that runs.

    agent.mcp_servers ──> list the tools (before the run) ──> session, shared or of one trajectory ──> calls

A session is a task: the library's client must be entered and left by the same one.
"""

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TextIO
from urllib.parse import urlsplit

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS
from mcp.types import Tool as McpTool

from rlscale.agents.tool import cut_text, result_text
from rlscale.agents.tool_pool import SHARED, Owner, ToolResult
from rlscale.config.addresses import public_url
from rlscale.config.groups.agent import AgentConfig, McpSessions
from rlscale.errors import ConfigError, Problem
from rlscale.hosts import is_loopback
from rlscale.images import IMAGE_TYPE, Image
from rlscale.renderers.renderer import ToolSpec

KEY = "agent.mcp_servers"
CLOSE_S = 5.0
"""Time of a session to end; a server that is a command is ended by the library after 2 s."""

CONNECT_S = 30.0
MAX_ERROR_CHARS = 300


class McpTools:
    """The tools of one server; see `ToolCaller`.

    Args:
        specs: of `list_tools`.
        reads_images: results have their images; else `[image]` stands for one.
    """

    def __init__(
        self, server: str, specs: Sequence[ToolSpec], config: AgentConfig, *, reads_images: bool = False
    ) -> None:
        self.specs, self._reads_images = list(specs), reads_images
        self._server, self._timeout_s, self._max_chars = server, config.tool_timeout_s, config.max_tool_chars
        self._is_shared = config.mcp_sessions == McpSessions.shared
        self.keeps_state = not self._is_shared
        self._sessions: dict[Owner, _Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Sequence[Image] = ()) -> ToolResult:
        """See ToolCaller."""
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return _rejected(f"the arguments of {name} must be a JSON object; {error}")
        if not isinstance(given, dict):
            return _rejected(f"the arguments of {name} must be a JSON object, got {arguments[:80]}")
        # One session for all, or one for each attempt at a trajectory.
        owner = SHARED if self._is_shared else owner
        # Opened at the first call: many trajectories make none.
        session = self._sessions.setdefault(owner, _Session(self._server))
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await session.call(name, given)
        except TimeoutError:
            return _failed(f"did not return within agent.tool_timeout_s={self._timeout_s:g}")
        except MCPError as error:
            # Arguments are the policy's; any other error of the protocol is the server's.
            if error.error.code == INVALID_PARAMS:
                return _rejected(cut_text(str(error), self._max_chars))
            self._drop(owner, session)
            return _failed(_describe(error))
        except Exception as error:  # of the library and its transports: a broken connection has many types
            # The next call opens another session.
            self._drop(owner, session)
            return _failed(_describe(error, session.stderr_end()))
        text = cut_text(_text(found), self._max_chars)
        if found.is_error:
            return _rejected(text)
        return ToolResult(text=text, parts=self._parts(found) if self._reads_images else ())

    def _parts(self, found: Any) -> tuple[dict[str, str], ...]:
        """Texts and images of a result; empty: it has no image."""
        if not any(each.type == IMAGE_TYPE for each in found.content):
            return ()
        return tuple(
            {"type": IMAGE_TYPE, IMAGE_TYPE: f"data:{each.mime_type};base64,{each.data}"}
            if each.type == IMAGE_TYPE
            else {"type": "text", "text": cut_text(_text_of(each), self._max_chars)}
            for each in found.content
        )

    async def release(self, owner: Owner) -> None:
        """See ToolCaller."""
        if owner in self._sessions:
            self._drop(owner, self._sessions[owner])

    async def close(self, *, wait: bool) -> None:
        """Ends all sessions."""
        for owner, session in list(self._sessions.items()):
            self._drop(owner, session)
        if self._closing:
            await asyncio.wait(self._closing, timeout=2 * CLOSE_S)

    def _drop(self, owner: Owner, session: "_Session") -> None:
        if self._sessions.get(owner) is session:
            del self._sessions[owner]
        # Not awaited: the trajectory need not wait for the end of a process.
        task = asyncio.get_running_loop().create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Session:
    """A connection to a server, which is started if it is a command."""

    def __init__(self, server: str) -> None:
        self._server, self._closing = server, asyncio.Event()
        self._stderr: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115, `close` closes it
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def client(self) -> Client:
        """The connected client; raises what the connection raises."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(self._client)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        client = await self.client()
        assert self._task is not None, "a connected session has a task"
        # A task: it and the connection are waited for together.
        call = asyncio.ensure_future(client.call_tool(name, arguments))
        # The library does not end all calls of a server that has died.
        try:
            await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ConnectionError("the connection has ended")
            return call.result()
        finally:
            call.cancel()

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            _, pending = await asyncio.wait([self._task], timeout=CLOSE_S)
            for task in pending:
                task.cancel()
        self._stderr.close()

    def stderr_end(self) -> str:
        """The last line that a command wrote to its standard error."""
        with suppress(ValueError, OSError):  # it is closed
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
            return next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return ""

    async def _run(self) -> None:
        try:
            async with Client(_transport(self._server, self._stderr)) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if not self._client.done():
                self._client.set_exception(error)
                self._client.exception()  # retrieved: no caller may wait for it any more
            if not isinstance(error, Exception):
                raise


async def list_tools(server: str, *, key: str, timeout_s: float) -> list[ToolSpec]:
    """The tools of a server.

    Raises:
        ConfigError: it cannot be started or reached, or does not list its tools.
    """
    session = _Session(server)
    try:
        async with asyncio.timeout(timeout_s):
            found = await _all_tools(await session.client())
    except TimeoutError:
        cause = f"it did not answer within agent.tool_timeout_s={timeout_s:g}"
        raise _error(key, server, f"check the server, or set a longer time: {cause}") from None
    except Exception as error:
        advice = "check that its command starts it in a terminal, or that a server runs at its URL"
        raise _error(key, server, f"{_describe(error, session.stderr_end())}; {advice}") from error
    finally:
        await session.close()
    if not found:
        raise _error(key, server, "it has no tools; remove it")
    return [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description or "",
                "parameters": dict(each.input_schema),
            },
        }
        for each in found
    ]


async def _all_tools(client: Client) -> list[McpTool]:
    """The tools of all pages."""
    tools: list[McpTool] = []
    cursors: list[str | None] = [None]
    while True:
        page = await client.list_tools(cursor=cursors[-1])
        tools += page.tools
        # A server may repeat a page for ever.
        if page.next_cursor is None or page.next_cursor in cursors:
            return tools
        cursors.append(page.next_cursor)


def shown_server(server: str) -> str:
    """A server for messages: a URL without its secrets, a command as it is."""
    return public_url(server) if is_url(server) else server


def is_url(server: str) -> bool:
    """Whether a server is a URL; else it is a command."""
    return server.startswith(("http://", "https://"))


def _transport(server: str, stderr: TextIO) -> Any:
    if is_url(server):
        return _open_url(server)
    command, *arguments = shlex.split(server)
    return stdio_client(StdioServerParameters(command=command, args=arguments), errlog=stderr)


@asynccontextmanager
async def _open_url(url: str) -> AsyncIterator[Any]:
    # A proxy of the environment must not get requests to this machine. A call has its own deadline.
    trusts_env = not is_loopback(urlsplit(url).hostname or "")
    timeout = httpx2.Timeout(CONNECT_S, read=None)
    async with (
        httpx2.AsyncClient(timeout=timeout, trust_env=trusts_env) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _text_of(part: Any) -> str:
    # Sound and other parts have no tokens.
    return part.text if part.type == "text" else f"[{part.type}]"


def _text(found: Any) -> str:
    parts = [_text_of(each) for each in found.content]
    if not parts and found.structured_content is not None:
        return result_text(found.structured_content)
    return "\n".join(parts)


def _describe(error: BaseException, stderr: str = "") -> str:
    """One line of an error; of a group, its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return (f"{text} ({stderr})" if stderr else text)[:MAX_ERROR_CHARS]


def _rejected(text: str) -> ToolResult:
    return ToolResult(text=f"Error: {text}", is_rejected=True)


def _failed(cause: str) -> ToolResult:
    return ToolResult(text=f"Error: the tool failed: {cause}", error=cause)


def _error(key: str, server: str, fix: str) -> ConfigError:
    return ConfigError(
        [Problem(path=key, rule="be a server that lists its tools", value=shown_server(server), fix=fix)]
    )
