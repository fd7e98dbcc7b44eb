"""Fake of a SandboxFusion service: `/run_code` for bash and Python. Every program has a sandbox of processes."""

import base64
import binascii
from typing import Any

from aiohttp import web

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import SandboxLimits
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox

PROGRAMS = {"bash": ("bash", "program.sh"), "python": ("python3", "program.py")}


class FakeFusion:
    """The service. `broken` makes every answer an error of the service."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self.broken = False

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/run_code", self._run_code)
        return app

    async def _run_code(self, request: web.Request) -> web.Response:
        given = await request.json()
        if self.broken:
            return web.json_response({"status": "SandboxError", "message": "no worker", "files": {}})
        if given["language"] not in PROGRAMS:
            return web.Response(status=422, text="unknown language")
        async with SubprocessSandbox(self._limits) as sandbox:
            return web.json_response(await self._run(sandbox, given))

    async def _run(self, sandbox: SubprocessSandbox, given: dict[str, Any]) -> dict[str, Any]:
        program, name = PROGRAMS[given["language"]]
        for path, content in (given.get("files") or {}).items():
            await sandbox.write(f"work/{path}", base64.b64decode(content))
        await sandbox.write(name, given["code"])
        command = f"mkdir -p work && cd work && HOME=$PWD exec {program} ../{name}"
        stdin = given.get("stdin") or ""
        result = await sandbox.exec(command, stdin=stdin, timeout_s=given.get("run_timeout", 10))
        files = {}
        for path in given.get("fetch_files") or []:
            try:
                files[path] = binascii.b2a_base64(await sandbox.read(f"work/{path}"), newline=False).decode()
            except (OSError, SandboxError):
                continue
        run = {
            "status": "TimeLimitExceeded" if result.timed_out else "Finished",
            "execution_time": result.duration_s,
            "return_code": None if result.timed_out else result.exit_code,
            "stdout": result.stdout,
            "stderr": "" if result.timed_out else result.stderr,
        }
        is_fine = not result.timed_out and result.exit_code == 0
        return {"status": "Success" if is_fine else "Failed", "message": "", "run_result": run, "files": files}
