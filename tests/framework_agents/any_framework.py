"""Replaces this process by the agent of one of three frameworks, or by the example of one, chosen by the trajectory."""

import json
import os
import sys
from pathlib import Path

PROGRAMS = ("openai_agents", "pydantic_ai", "smolagents")

number = json.loads(Path(os.environ["RLSCALE_TASK"]).read_text())["id"]
if number % 4 < len(PROGRAMS):
    program = Path(__file__).with_name(f"{PROGRAMS[number % 4]}_program.py")
    os.environ["RLSCALE_RESULT"] = os.devnull  # the reward of the run grades a model that knows nothing
    name, words = program.stem, [str(program)]
else:
    name, words = "framework_agent", ["-m", "rlscale.agents.run_child", "rlscale.examples.framework_agent:run"]
print(f"framework: {name}", flush=True)
os.execv(sys.executable, [sys.executable, *words])
