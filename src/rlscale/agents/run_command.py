"""Agents in processes: a command line, or a Python function in a separate interpreter.

run ── task file, environment ──> supervisor ──> command ── requests ──> gateway
 │ <── output (log), result file, exit code ──────┘
 └── deadline or end of the run: SIGTERM, then SIGKILL for every process that it started
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rlscale.agents import run_supervisor
from rlscale.agents.run_log import TrajectoryLog
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask, parse_result
from rlscale.secrets import is_secret
from rlscale.types import Failure, FailureCause

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL, for an agent that frees what it has opened elsewhere."""

END_S = 3.0
"""Time after SIGKILL in which the supervisor reaps all processes."""

MAX_RESULT_BYTES = 2**20

TASK_FILE, RESULT_FILE = "RLSCALE_TASK", "RLSCALE_RESULT"
"""Environment variables with the paths of the task, a JSON object, and of the result, which the agent may write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandAgent:
    """An agent that is a command.

    Example:
        agent = CommandAgent(command=["python", "my_agent.py", "{task_file}"])
        result = await agent.run(task, session, log)
    """

    command: Sequence[str]  # `{task_file}`, `{result_file}`, `{base_url}`, `{model}` are replaced
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: Sequence[str] = ()  # variables of this process that are passed on although they look like secrets
    policy_errors: tuple[str, ...] = ()  # exceptions in the last line of a Python program's output that are graded
    has_own_folder: bool = True  # a new working folder for each trajectory; False: that of the run

    async def run(self, task: AgentTask, session: AgentSession, log: TrajectoryLog) -> AgentResult:
        """Runs the command to its end. Cancelling it ends all of its processes.

        Raises:
            AgentFailed: it could not be executed, or ended with an exit code, a signal or a wrong result.
        """
        folder = Path(tempfile.mkdtemp(prefix=f"rlscale-agent-{task.id}-"))
        try:
            return await self._run(task, session, log, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run(self, task: AgentTask, session: AgentSession, log: TrajectoryLog, folder: Path) -> AgentResult:
        files = {TASK_FILE: folder / "task.json", RESULT_FILE: folder / "result.json"}
        files[TASK_FILE].write_text(json.dumps(task.to_json(), ensure_ascii=False))
        work = folder / "work"
        work.mkdir()
        values = {
            "task_file": str(files[TASK_FILE]),
            "result_file": str(files[RESULT_FILE]),
            "base_url": session.base_url,
            "model": session.model,
        }
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", "-S", run_supervisor.__file__, str(GRACE_S)],
            *fill_command(self.command, values),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=work if self.has_own_folder else None,
            env=agent_environment(session, self.env, self.pass_env) | {name: str(path) for name, path in files.items()},
            start_new_session=True,  # Ctrl-C in the terminal reaches the run alone
        )
        reading = asyncio.create_task(_read_output(process, log))
        try:
            code = await process.wait()
        finally:
            await _end(process, reading)
        return _read_end(code, files[RESULT_FILE], log, self.policy_errors)


def fill_command(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words of a command with their values, and paths that hold in any folder.

    A first word `python` is this interpreter. A word that names a file of the run's working folder becomes its full
    path, because the agent works in another folder.
    """
    words = []
    for number, word in enumerate(command):
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        if number == 0 and word == "python":
            word = sys.executable
        elif (number > 0 or "/" in word) and not os.path.isabs(word) and os.path.isfile(word):
            word = str(Path(word).absolute())
        words.append(word)
    return words


def agent_environment(session: AgentSession, env: Mapping[str, str], pass_env: Sequence[str] = ()) -> dict[str, str]:
    """Environment of an agent: that of this process without its secrets, the URLs and the key, and `env`."""
    inherited = {name: value for name, value in os.environ.items() if name in pass_env or not is_secret(name)}
    host = urlsplit(session.base_url).hostname or ""
    # A proxy of the machine must not get the requests to the gateway.
    direct = {name: ",".join(filter(None, [os.environ.get(name), host])) for name in ("NO_PROXY", "no_proxy")}
    own = {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.anthropic_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "RLSCALE_MODEL": session.model,
        "PYTHONUNBUFFERED": "1",  # the log of an agent that is killed has its last lines
    }
    return {**inherited, **direct, **own, **env}


async def _read_output(process: asyncio.subprocess.Process, log: TrajectoryLog) -> None:
    assert process.stdout is not None, "the output is a pipe"
    while content := await process.stdout.read(2**16):
        log.write(content)


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    """Ends the processes if they still run, and reads the rest of their output."""
    ending = asyncio.ensure_future(_end_processes(process, reading))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        # A second cancellation does not leave processes behind: the end takes a few seconds at most.
        await ending
        raise


async def _end_processes(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    assert process.stdin is not None, "the input is a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S + END_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
    await asyncio.wait([reading], timeout=1.0)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


def _read_end(code: int, file: Path, log: TrajectoryLog, policy_errors: tuple[str, ...]) -> AgentResult:
    result = _read_result_file(file)
    # An agent that names the policy or a budget as its end may exit as it likes.
    if code == 0 or (result is not None and result.failure is not None):
        return result or AgentResult()
    last = f"; its last output: {log.last_line}" if log.last_line else ""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise AgentFailed(FailureCause.environment, f"its process was ended by {name}{last}")
    # Python writes `package.Name: message` as the last line of a traceback.
    name = log.last_line.partition(":")[0]
    if name in policy_errors or name.rpartition(".")[2] in policy_errors:
        return AgentResult(failure=Failure(cause=FailureCause.policy, message=log.last_line))
    raise AgentFailed(FailureCause.controller, f"it exited with code {code}{last}")


def _read_result_file(file: Path) -> AgentResult | None:
    try:
        # Not blocking: the agent, or a program that the policy wrote, may have left a pipe with this name.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as content:
            found = content.read(MAX_RESULT_BYTES + 1)
    except OSError:
        return None
    if len(found) > MAX_RESULT_BYTES:
        raise AgentFailed(FailureCause.controller, f"its result must have at most {MAX_RESULT_BYTES} bytes")
    return parse_result(found)
