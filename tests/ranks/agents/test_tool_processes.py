"""Tools in processes: what a tool does to its process is the failure of one call."""

import asyncio
from pathlib import Path

import pytest

from rlscale.agents.content_parts import NO_IMAGES
from rlscale.agents.load_tools import load_tools
from rlscale.agents.tool_pool import FunctionTools, ToolBox, ToolResult
from rlscale.config.groups.agent import AgentConfig, OnToolError

MODULE = """
import asyncio, ctypes, os, sys, time
from PIL import Image
from rlscale.agents import ToolError, tool

picture = Image.new("RGB", (8, 8), "red")

@tool
def plain(kind: str, number: int = 0) -> object:
    if kind == "exit": sys.exit(3)
    if kind == "_exit": os._exit(5)
    if kind == "segfault": ctypes.string_at(0)
    if kind == "loop":
        while True: pass
    if kind == "print":
        for _ in range(30_000): print("x" * 100)
        return "printed"
    if kind == "long": return "y" * 10_000_000
    if kind == "raise": raise OSError("no route\\nto host")
    if kind == "wrong": raise ToolError("there is no unit parsec")
    if kind == "object": return {"sum": number}
    if kind == "unprintable": return Unprintable("x")
    if kind == "surrogate": return "a\\udc80b"
    if kind == "image": return ["a", picture]
    if kind == "far": return {"type": "image", "image": "http://a/b.png"}
    return number

class Unprintable(str):
    def encode(self, *args, **kwargs): raise RuntimeError("no text")

@tool
async def later(kind: str) -> str:
    if kind == "wait": await asyncio.sleep(1000)
    if kind == "block": time.sleep(1000)
    if kind == "wrong": raise ToolError("not found")
    await asyncio.sleep(0)
    return "later " + kind

tools = [plain, later]
"""

OUTCOMES = {
    '{"kind": "object", "number": 3}': ToolResult(text='{"sum":3}'),
    '{"kind": "print"}': ToolResult(text="printed"),
    '{"kind": "long"}': ToolResult(text="y" * 100 + "\n[9999900 more characters are cut off]"),
    '{"kind": "surrogate"}': ToolResult(text="a?b"),
    '{"kind": "wrong"}': ToolResult(text="Error: there is no unit parsec", is_rejected=True),
    '{"kind": 3}': ToolResult(
        text="Error: wrong arguments of plain: kind: Input should be a valid string", is_rejected=True
    ),
}
FAILURES = {
    "exit": "SystemExit: 3",
    "_exit": "its process exited with code 5",
    "segfault": "its process was ended by SIGSEGV",
    "loop": "did not return within agent.tool_timeout_s=3",
    "raise": "OSError: no route to host",
    "unprintable": "RuntimeError: no text",
    "image": NO_IMAGES,
    "far": "ValueError: an image must be on this machine, got http://a/b.png; download it and return its bytes",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


async def test_a_tool_harms_nothing_but_its_call() -> None:
    config = AgentConfig(tool_timeout_s=3.0, max_tool_chars=100, tool_processes=2, on_tool_error=OnToolError.fail)
    paths = ["tools_of_test:tools"]
    box = ToolBox([FunctionTools(load_tools(paths), paths, config)], config)
    try:
        good = [box.call("plain", arguments) for arguments in OUTCOMES]
        bad = [box.call("plain", f'{{"kind": "{kind}"}}') for kind in FAILURES]
        coroutines = [box.call("later", f'{{"kind": "{kind}"}}') for kind in ("now", "wait", "block", "wrong")]
        results = await asyncio.gather(*good, *bad, *coroutines)
    finally:
        await box.close(wait=False)
    numbers = iter(results)
    for expected in OUTCOMES.values():
        found = next(numbers)
        assert (found.text, found.is_rejected, found.error) == (expected.text, expected.is_rejected, None)
    for kind, cause in FAILURES.items():
        found = next(numbers)
        assert found.error is not None and found.error.startswith(cause), kind
        assert found.text == f"Error: the tool failed: {cause}" and not found.is_rejected
    now, wait, block, wrong = numbers
    assert (now.text, wrong.text, wrong.is_rejected) == ("later now", "Error: not found", True)
    for late in (wait, block):
        assert late.error is not None
        assert late.error.startswith("did not return within agent.tool_timeout_s=3 (tools_of_test.py:")
