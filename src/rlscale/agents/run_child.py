"""Program of an agent function in a separate process: reads the task, calls the function, writes its result.

As a program, `python -m rlscale.agents.run_child MODULE:FUNCTION POLICY_ERROR...`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from rlscale.agents.run_task import AgentSession, AgentTask, is_policy_error

CUSTOM = "RLSCALE_CUSTOM"
"""Environment variable with the config's node `custom` as JSON, for a function with a parameter of that name."""


def main(path: str, policy_errors: tuple[str, ...]) -> None:
    """Runs the function `path`. An exception of the names `policy_errors` becomes a graded end."""
    task = AgentTask(**json.loads(Path(os.environ["RLSCALE_TASK"]).read_text()))
    session = AgentSession(
        base_url=os.environ["OPENAI_BASE_URL"],
        anthropic_url=os.environ["ANTHROPIC_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model=os.environ["RLSCALE_MODEL"],
    )
    try:
        result = call_function(path, task, session)
    except Exception as error:  # user code raises anything
        if not is_policy_error(error, policy_errors):
            raise
        result = {"failure": "policy", "message": f"{type(error).__name__}: {error}"}
    # Complete or absent, also if the process is killed while it writes.
    file = Path(os.environ["RLSCALE_RESULT"])
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, default=_to_json))
    part.replace(file)


def call_function(path: str, task: AgentTask, session: AgentSession) -> Any:
    """The result of an agent function, which may be a coroutine function."""
    module, _, name = path.replace(":", ".").rpartition(".")
    function = getattr(importlib.import_module(module), name)
    custom = json.loads(os.environ.pop(CUSTOM, "{}"))
    # Without the config's packages, whose import takes longer than many agents.
    further = {"custom": custom} if "custom" in inspect.signature(function).parameters else {}
    found = function(task, session, **further)
    return asyncio.run(_finish(found)) if inspect.isawaitable(found) else found


async def _finish(found: Any) -> Any:
    return await found


def _to_json(value: Any) -> Any:
    """A number of another library as a number of Python."""
    return value.item()


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]))
