"""Evaluations of a run, of its checkpoint alone, and again without a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.observe.evaluation_files import read_about, read_records
from tests.integration.conftest import REWARDED, Command, Finished

SETS = """
defaults: {max_examples: 6, n_samples_per_eval_prompt: 2, temperature: 0.9}
datasets:
  random: {path: "builtin:arithmetic/heldout.jsonl", rm_type: random, stop: ["1"], max_response_len: 4}
  lengths: {path: "builtin:arithmetic/heldout.jsonl", custom_rm_path: "own_rewards:length", max_response_len: 2}
"""
TOOL_SETS = """
defaults:
  apply_chat_template: true
  apply_chat_template_kwargs:
    chat_template: "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
  max_response_len: 2
datasets:
  calculator: {path: tasks.jsonl, tool_key: calculators, custom_generate_function_path: "own_tools:generate"}
  search: {path: tasks.jsonl, tool_key: searches}
  plain: {path: tasks.jsonl}
"""
GENERATE = """
async def generate(trajectory, session):
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    called = [tool["function"]["name"] for tool in trajectory.prompt.metadata["tools"]]
    trajectory.metadata["called"] = called
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


@pytest.mark.nightly
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


def tools(*names: str) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def test_the_tools_of_each_set_reach_its_prompts_and_its_generate_function(command: Command) -> None:
    rows = [
        {"question": "1+1=", "answer": "2", "calculators": tools("add", "sub"), "searches": tools("find")},
        {"question": "2+2=", "answer": "4", "calculators": tools("mul"), "searches": json.dumps(tools("look"))},
    ]
    (command.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (command.folder / "tools.yaml").write_text(TOOL_SETS)
    (command.folder / "own_tools.py").write_text(GENERATE)
    done = command.run(
        "data.num_rollout=0",
        "debug.rollout_only=true",
        "eval.config=tools.yaml",
        "eval.interval=1",
        "eval.input_key=question",
        "eval.label_key=answer",
        REWARDED,
    )
    assert done.code == 0, done.err
    (folder,) = (command.run_dir / "evaluations").iterdir()
    records = {
        name: sorted(read_records(folder / about["file"]), key=lambda record: record["row"])
        for name, about in read_about(folder)["sets"].items()
    }
    prompts = {name: [record["prompt"] for record in found] for name, found in records.items()}
    assert prompts == {
        "calculator": ["[add][sub]1+1=", "[mul]2+2="],
        "search": ["[find]1+1=", "[look]2+2="],
        "plain": ["1+1=", "2+2="],
    }
    called = [record["samples"][0]["metadata"].get("called") for record in records["calculator"]]
    assert called == [["add", "sub"], ["mul"]], "its own function gets the tools"
    assert all("called" not in record["samples"][0]["metadata"] for record in records["search"])
    assert [record["metadata"] for record in records["plain"]] == [{}, {}]
