"""The tools of an MCP server in this process. Real servers: tests/ranks/agents."""

from typing import Any

import pytest
from mcp.server.lowlevel import Server
from mcp.types import ListToolsResult, PaginatedRequestParams, Tool

from rlscale.agents import mcp_tools
from rlscale.agents.mcp_tools import list_tools

PAGES = [["add", "subtract"], ["multiply"], ["divide"]]


def paged_server(*, repeats: bool = False) -> Server[Any]:
    """A server that returns its tools in pages; the cursor is the number of the next one."""

    async def list_page(_: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        number = int((params and params.cursor) or 0)
        tools = [Tool(name=name, input_schema={"type": "object"}) for name in PAGES[number]]
        following = number if repeats else number + 1
        return ListToolsResult(tools=tools, next_cursor=str(following) if following < len(PAGES) else None)

    return Server("pages", on_list_tools=list_page)


async def test_tools_of_all_pages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_transport", lambda *_: paged_server())
    found = await list_tools("pages", key="agent.mcp_servers.0", timeout_s=30)
    assert [each["function"]["name"] for each in found] == ["add", "subtract", "multiply", "divide"]


async def test_a_page_that_names_itself_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_transport", lambda *_: paged_server(repeats=True))
    found = await list_tools("pages", key="agent.mcp_servers.0", timeout_s=30)
    assert [each["function"]["name"] for each in found] == 2 * ["add", "subtract"]  # which the config refuses
