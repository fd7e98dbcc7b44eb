"""Tools of real MCP servers: a command, and a server over HTTP."""

import asyncio
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rlscale.agents.load_tools import check_server_names, load_servers
from rlscale.agents.mcp_tools import McpTools
from rlscale.agents.tool import tool
from rlscale.agents.tool_pool import ToolBox
from rlscale.config.groups.agent import AgentConfig, McpSessions, OnToolError
from rlscale.engines.ports import free_port
from rlscale.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "mcp_server.py"
COMMAND = shlex.join([sys.executable, str(SCRIPT)])
START_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port("127.0.0.1")
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["command", "url"])
def server(request: pytest.FixtureRequest) -> str:
    return COMMAND if request.param == "command" else str(request.getfixturevalue("url"))


async def open_box(server: str, *, timeout_s: float = START_S, sessions: str = "shared") -> ToolBox:
    config = AgentConfig(
        mcp_servers=[server],
        mcp_sessions=McpSessions(sessions),
        tool_timeout_s=timeout_s,
        on_tool_error=OnToolError.retry,
        tool_retries=1,
        max_tool_chars=60,
    )
    (specs,) = await load_servers([server], timeout_s=START_S)
    return ToolBox([McpTools(server, specs, config)], config)


@pytest.fixture
async def boxes() -> AsyncIterator[list[ToolBox]]:
    opened: list[ToolBox] = []
    yield opened
    for box in opened:
        await box.close(wait=True)


async def test_the_policy_calls_the_tools_of_a_server(server: str, boxes: list[ToolBox]) -> None:
    box = await open_box(server)
    boxes.append(box)
    specs = {spec["function"]["name"]: spec["function"] for spec in box.specs}
    assert list(specs) == ["add", "remember", "fail", "crash", "wait"]
    assert specs["add"]["description"] == "Adds two numbers."
    assert list(specs["add"]["parameters"]["properties"]) == ["a", "b"]
    numbers = await asyncio.gather(*[box.call("add", f'{{"a": {i}, "b": 1}}') for i in range(5)])
    assert [each.text for each in numbers] == ["1", "2", "3", "4", "5"]
    wrong = await asyncio.gather(
        box.call("add", '{"a": 1}'), box.call("add", "[1]"), box.call("add", "{"), box.call("fail", "")
    )
    assert all(each.is_rejected and each.error is None and each.text.startswith("Error: ") for each in wrong)
    assert wrong[3].text == "Error: Error executing tool fail"
    first = await box.call("remember", '{"text": "a"}', 1)
    second = await box.call("remember", '{"text": "b"}', 2)
    assert second.text == f"{first.text}+b"
    long = await box.call("remember", f'{{"text": "{"c" * 100}"}}', 2)
    assert long.text.endswith("more characters are cut off]")


async def test_a_trajectory_can_have_its_own_session(boxes: list[ToolBox]) -> None:
    box = await open_box(COMMAND, sessions="trajectory")
    boxes.append(box)
    first = await box.call("remember", '{"text": "a"}', 1)
    other, second = await asyncio.gather(
        box.call("remember", '{"text": "b"}', 2), box.call("remember", '{"text": "c"}', 1)
    )
    assert second.text == f"{first.text}+c"
    assert other.text.endswith(" b") and other.text.split()[0] != first.text.split()[0]
    await box.release(1)
    again = await box.call("remember", '{"text": "d"}', 1)
    assert again.text.endswith(" d")


async def test_a_server_that_crashes_is_started_again(boxes: list[ToolBox]) -> None:
    box = await open_box(COMMAND)
    boxes.append(box)
    crashed = await box.call("crash", "")
    assert crashed.error is not None and crashed.num_calls == 2
    assert (await box.call("add", '{"a": 1, "b": 1}')).text == "2"


async def test_a_late_call_is_a_failure(url: str, boxes: list[ToolBox]) -> None:
    box = await open_box(url, timeout_s=1.0)
    boxes.append(box)
    late = await box.call("wait", "")
    assert late.error == "did not return within agent.tool_timeout_s=1"


async def test_servers_that_do_not_answer_are_named(tmp_path: Path) -> None:
    ends = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such database')"])
    silent = shlex.join([sys.executable, "-c", "import time; time.sleep(1000)"])
    servers = ["no_such_command --fast", ends, silent, "http://user:secret@127.0.0.1:9/mcp"]
    with pytest.raises(ConfigError) as caught:
        await load_servers(servers, timeout_s=5.0)
    lines = [str(problem) for problem in caught.value.problems]
    assert [line.split()[0] for line in lines] == [f"agent.mcp_servers.{i}" for i in range(4)]
    assert "must be a server that lists its tools, got no_such_command --fast; FileNotFoundError" in lines[0]
    assert lines[0].endswith("; check that its command starts it in a terminal, or that a server runs at its URL")
    assert "no such database" in lines[1]
    assert lines[2].endswith("it did not answer within agent.tool_timeout_s=5")
    assert "secret" not in lines[3]


async def test_names_of_tools_are_unique() -> None:
    @tool
    def add(a: int) -> int:
        return a

    spec = {"type": "function", "function": {"name": "add"}}
    (problem,) = check_server_names([add], [[], [spec]])
    assert str(problem).startswith("agent.mcp_servers.1 must have tools with different names than the others, got add;")


async def test_no_proxy_gets_requests_to_this_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    (specs,) = await load_servers([url], timeout_s=START_S)
    assert "add" in [each["function"]["name"] for each in specs]
