"""The tool `python` in real sandboxes."""

import json

from rlscale.agents.sandbox_tool import SandboxTools, needs_sandbox, python
from rlscale.agents.tool_pool import SHARED
from rlscale.config import SandboxConfig, SandboxKind
from rlscale.types import FailureCause


async def test_programs_of_an_attempt_share_files_and_nothing_else() -> None:
    tools = SandboxTools(SandboxConfig(kind=SandboxKind.subprocess, pool_size=1), max_chars=1000)

    async def run(code: str, owner: object = "a") -> str:
        return (await tools.call("python", json.dumps({"code": code}), owner)).text

    try:
        assert await run("print(6 * 7); open('file', 'w').write('kept')") == "42"
        assert await run("print(open('file').read())") == "kept"
        assert "FileNotFoundError" in await run("open('file')", "b")
        assert "FileNotFoundError" in await run("open('file')", SHARED)
        await tools.release("a")
        assert "FileNotFoundError" in await run("open('file')")
        rejected = await tools.call("python", '{"cod": 1}', "a")
        assert rejected.is_rejected and "code" in rejected.text
    finally:
        await tools.close(wait=True)
    failed = await tools.call("python", '{"code": "1"}', "a")
    assert failed.cause == FailureCause.sandbox and failed.error == "the pool of sandboxes is closed"


def test_only_this_tool_needs_a_sandbox() -> None:
    assert needs_sandbox(python)
