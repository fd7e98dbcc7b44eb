"""Evaluations of a run, of its checkpoint alone, and again without a model."""

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import REWARDED, Command, Finished

SETS = """
defaults: {max_examples: 6, n_samples_per_eval_prompt: 2, temperature: 0.9}
datasets:
  random: {path: "builtin:arithmetic/heldout.jsonl", rm_type: random, stop: ["1"], max_response_len: 4}
  lengths: {path: "builtin:arithmetic/heldout.jsonl", custom_rm_path: "own_rewards:length", max_response_len: 2}
"""
LENGTH = "def length(sample):\n    return float(sample.response_len)\n"


def evaluate(command: Command, *words: str) -> Finished:
    """Runs `rlscale-eval` in the folder of the command, with its Ray."""
    env = command.environment()
    made = [sys.executable, "-m", "rlscale.cli.eval", *words]
    done = subprocess.run(made, cwd=command.folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


def lines(folder: Path) -> list[str]:
    return sorted(line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines())


def test_a_checkpoint_alone_gives_the_samples_that_its_run_kept(command: Command) -> None:
    (command.folder / "sets.yaml").write_text(SETS)
    (command.folder / "own_rewards.py").write_text(LENGTH)
    own = ("eval.config=sets.yaml", "eval.interval=1", "checkpoint.save_interval=1", "eval.keep_last=2")
    done = command.run("data.num_rollout=2", REWARDED, *own)
    assert done.code == 0, done.err
    kept = command.run_dir / "evaluations"
    assert sorted(path.name for path in kept.iterdir()) == ["v00000001", "v00000002"]
    assert [m["eval/weight_version"] for m in command.metrics() if "eval/weight_version" in m] == [0, 1, 2]
    about = json.loads((kept / "v00000001" / "evaluation.json").read_text())
    assert about["metrics"]["eval/lengths/reward_mean"] == 2.0, "each set has its reward and its length"
    assert 0 < about["metrics"]["eval/random/truncated_share"] <= 1

    alone = evaluate(command, "run/checkpoints/rollout_00000001", "run.dir=alone", f"model.cache_dir={command.cache}")
    assert alone.code == 0, alone.err
    assert "version 1" in alone.out and "lengths" in alone.out
    assert lines(command.folder / "alone" / "evaluations" / "v00000001") == lines(kept / "v00000001")
    assert not (command.folder / "alone" / "checkpoints").exists(), "an evaluation trains and saves nothing"
    assert not list((command.folder / "alone" / "logs").glob("actor_rank*"))

    again = evaluate(command, "--regrade", "alone", "eval.config=sets.yaml")
    assert again.code == 0, again.err
    assert "version 1: eval/lengths/reward_mean 2.0000 -> 2.0000" in again.out
    assert command.left_over() == {}
