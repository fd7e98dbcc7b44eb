"""A run with a gateway: a generate function of the user lets an agent use a session, and the gateway is killed."""

import json

import pytest

from tests.integration.conftest import REWARDED, Command

PLUGIN = """
import os
import signal
from pathlib import Path

from openai import AsyncOpenAI


async def generate(trajectory, session):
    gateway = session.gateway
    opened = await gateway.open_session(trajectory, session.params, lifetime_s=300, max_turns=2)
    agent = AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=5)
    messages = [{"role": "user", "content": "12+34="}]
    for turn in range(2):
        answer = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "1+1="}
        ]
        if trajectory.id == 5 and turn == 0:
            kill_gateway()
    await agent.close()
    record = await gateway.finish(opened.id)
    trajectory.turns, trajectory.status, trajectory.metadata = record.turns, record.status, record.metadata


def kill_gateway():
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes()
            is_child = f"PPid:\\t{os.getppid()}\\n" in (folder / "status").read_text()
        except OSError:
            continue
        if b"serve_gateway" in command and is_child:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("the gateway is a child of the driver")
"""


@pytest.mark.nightly
def test_an_agent_trains_through_the_gateway_which_is_killed(command: Command) -> None:
    (command.folder / "my_agent.py").write_text(PLUGIN)
    done = command.run(
        REWARDED,
        "data.num_rollout=2",
        "eval.prompt_data=null",
        "eval.interval=null",
        "rollout.max_response_len=8",
        "gateway.enabled=true",
        "sampling.custom_generate_function_path=my_agent:generate",
        "fault_tolerance.enabled=true",
    )
    assert done.code == 0, done.err
    assert "restarting gateway" in done.out + done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert len(steps) == 2
    assert all(0 <= m["logprob_diff/mean"] < 1e-4 for m in steps)
    assert not list((command.run_dir / "gateway").iterdir()), "every session was finished"
    arguments = json.loads((command.run_dir / "logs" / "gateway_arguments.json").read_text())
    assert arguments["host"] == "127.0.0.1" and not [each for each in arguments if "key" in each or "secret" in each]
