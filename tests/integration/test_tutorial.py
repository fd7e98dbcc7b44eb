"""The commands of the tutorial give the results that it describes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "your-own-reward.md"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.nightly
@pytest.mark.parametrize("num_rollout", [3, 50])
def test_the_commands_of_the_tutorial_run(num_rollout: int, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(code_blocks("python")[0], encoding="utf-8")
    lines = [line for block in code_blocks("bash") for line in block.splitlines()]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    outputs = []
    for line in lines:
        # The tutorial trains for 50 rollouts.
        line = line.replace("data.num_rollout=50", f"data.num_rollout={num_rollout}")
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        outputs.append(done.stdout)
    run = tmp_path / "runs" / "my_reward"
    assert (run / "report.html").stat().st_size > 10_000
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert len(rewards) == num_rollout
    if num_rollout == 50:
        assert sum(rewards[-10:]) > sum(rewards[:10]), "the model learns from the reward"
    assert "reward.custom_path: null -> my_reward:score" in outputs[-1]
