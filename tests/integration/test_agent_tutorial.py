"""The tutorial of an agent by its URL, word for word but for the installation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "agent-by-url.md"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.timeout(1500)
@pytest.mark.nightly
@pytest.mark.parametrize("num_rollout", [40])
def test_the_agents_of_the_tutorial_train(num_rollout: int, tmp_path: Path) -> None:
    function, program = code_blocks("python")
    (tmp_path / "my_agent.py").write_text(function, encoding="utf-8")
    (tmp_path / "my_program.py").write_text(program, encoding="utf-8")
    installation, *commands = code_blocks("bash")
    assert installation.splitlines()[0].startswith("bin/quickstart ")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in (line for block in commands for line in block.splitlines()):
        # The tutorial trains for 40 rollouts, which takes minutes.
        line = line.replace("data.num_rollout=40", f"data.num_rollout={num_rollout}")
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    metrics = (tmp_path / "runs" / "my_agent" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [record["reward/mean"] for record in map(json.loads, metrics) if "reward/mean" in record]
    assert len(rewards) == num_rollout
    if num_rollout == 40:
        assert sum(rewards[-10:]) > sum(rewards[:10]), "the model learns from the reward of the agent"
    logs = list((tmp_path / "runs" / "my_program" / "agents").rglob("*.log"))
    assert logs and all("turn 0 (sampled" in log.read_text() for log in logs)
