"""Writes synthetic run folders. Contains no tests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.config import load_config, to_yaml
from rlscale.observe.jsonl import JsonlSink
from rlscale.observe.provenance import write_provenance
from rlscale.observe.rollout_log import LEDGER_FILE, TIMELINES_FILE, TRAJECTORIES_FILE, RolloutLog
from rlscale.observe.run_end import EndReason, recorded_end
from rlscale.observe.step_lines import StepLines
from rlscale.observe.trajectory_tree import trajectory_tree
from rlscale.types import Group, Prompt, Sample, SampleStatus
from tests.unit.observe.report.made_conversations import failed_trajectory, tool_trajectory, tree_trajectory

ATTACK = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
"""Answer of a model that tries to inject HTML and scripts."""

PIECES = ["", "The", " answer", " is", " 42", ".", "\n", "<end>", ATTACK, " naïve 中文 🙂", "tool: 6*7=42"]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in token_ids)


def make_run(
    folder: Path, *, num_rollouts: int = 12, finished: bool = True, evaluates: bool = True, sft: bool = False
) -> Path:
    """Writes a run with rising reward, two turns in each answer, and a weight update within each answer."""
    config = load_config([f"data.num_rollout={num_rollouts}", "batch.n_samples_per_prompt=4", "run.name=made"])
    overrides = ["algo.eps_clip=0.1", f"run.name={ATTACK}"]
    write_provenance(folder, config_yaml=to_yaml(config), overrides=overrides, read_git=clean_checkout)
    metrics = JsonlSink(folder / "metrics.jsonl")
    rollouts = RolloutLog(folder, num_samples=4, text_of=PIECES.__getitem__, resume_at_step=0)
    if evaluates:
        metrics.log({"eval/reward_mean": 0.1}, step=0)
    for step in range(num_rollouts):
        groups = [make_group(step, i, sft=sft) for i in range(4)]
        rng = np.random.default_rng(step)
        chosen = rollouts.choose(groups)
        rollouts.write(step, groups, logprobs={i: _trainer(groups, i, rng) for i in chosen})
        metrics.log(_metrics(step, evaluates=evaluates and step % 4 == 3, sft=sft), step=step)
    if not sft:
        write_trajectories(folder, num_rollouts=num_rollouts)
    if finished:
        with recorded_end(folder) as end:
            end.reason = EndReason.finished
        result = {"num_tokens": 12345, "seconds": 67.8, "initial_eval": 0.1, "final_eval": 0.9, "warnings": [ATTACK]}
        (folder / "finished.json").write_text(json.dumps(result))
    return folder


def write_trajectories(folder: Path, *, num_rollouts: int) -> None:
    """Writes outcomes and timelines: in each rollout 8 groups of 4; 4 are trained, 3 dropped and one has failed.

    The first two groups of a rollout have timelines, in which trajectories differ in reward, length and tools.
    """
    ledger = StepLines(folder / LEDGER_FILE, resume_at_step=0)
    timelines = StepLines(folder / TIMELINES_FILE, resume_at_step=0)
    for step in range(num_rollouts):
        first = step * 32
        ledger.append(
            [
                {
                    "step": step,
                    "trained": [f"{first}-{first + 15}"],
                    "dropped/equal_rewards": [f"{first + 16}-{first + 27}"],
                    "failed/grader": [f"{first + 28}-{first + 29}", str(first + 30)],
                    "open": [str(first + 31)],
                }
            ]
        )
        groups = [_timed_group(step * 8 + i, "trained" if i == 0 else "dropped/equal_rewards") for i in range(2)]
        timelines.append([{"step": step, "start": 0.0, "num_groups": 8, "groups": groups}])
    ledger.close()
    timelines.close()
    last = num_rollouts - 1
    made = [make(last * 32 + i) for i, make in enumerate((tool_trajectory, tree_trajectory, failed_trajectory))]
    conversations = StepLines(folder / TRAJECTORIES_FILE, resume_at_step=num_rollouts)
    conversations.append([{"step": last, **trajectory_tree(each.samples(), PIECES.__getitem__)} for each in made])
    conversations.close()


def _timed_group(index: int, outcome: str) -> dict[str, Any]:
    trajectories = [
        {
            "id": index * 4 + j,
            "status": "completed",
            "reward": [0.0, 1.0, 0.5, None][j] if outcome == "trained" else 0.0,
            "tokens": 10 + 30 * j,
            "text": f"answer {j} {ATTACK}",
            "versions": [3, 4] if j == 1 else [3],
            "spans": [
                ["queue", 0, 200],
                ["generate", 200, 1000 + 500 * j],
                *([["tool", 1200 + 500 * j, 300]] if j % 2 else []),
                ["grade", 3200, 100],
                ["queue", 3300, 1700],
            ],
            **({"failure": f"grader: {ATTACK}", "retries": 2} if j == 3 and outcome == "trained" else {}),
        }
        for j in range(4)
    ]
    return {
        "group": index,
        "row": index,
        "prompt": f"What is 6 times 7? {ATTACK}",
        "outcome": outcome,
        "trajectories": trajectories,
    }


def clean_checkout(folder: Path) -> dict[str, Any]:
    """Git state without starting git."""
    return {"root": str(folder), "commit": "0123456789abcdef", "dirty": False}


def make_group(step: int, index: int, *, sft: bool = False) -> Group:
    prompt = Prompt(index=index, text=f"What is 6 times 7? {ATTACK}", token_ids=(1, 3), label="42")
    samples = []
    for j in range(4):
        sample = Sample(index=step * 16 + index * 4 + j, group_index=step * 4 + index, prompt=prompt, seed=0)
        first = [1, 2, 3, 6, 8][: 3 + j % 3]
        sample.append(first, logprobs=[-0.1 * (k + 1) for k in range(len(first))], weight_versions=[step] * len(first))
        sample.append([10], logprobs=[0.0], weight_versions=[step], trainable=False)
        sample.append([4, 9, 5, 7], logprobs=[-3.0, -0.01, -0.5, -0.001], weight_versions=[step + 1] * 4)
        sample.status = SampleStatus.truncated if j == 3 else SampleStatus.completed
        sample.reward = None if sft else float((step + index + j) % 3 == 0)
        sample.response = decode(sample.response_ids)
        samples.append(sample)
    return Group(index=step * 4 + index, prompt=prompt, samples=samples)


def _trainer(groups: Sequence[Group], index: int, rng: np.random.Generator) -> Any:
    sample = [sample for group in groups for sample in group.samples][index]
    values = np.array(sample.rollout_logprobs) + rng.normal(0, 1, sample.response_len) * 10.0 ** rng.uniform(
        -8, -3, sample.response_len
    )
    values[np.array(sample.loss_mask) == 0] = np.nan
    return values.astype(np.float32)


def _metrics(step: int, *, evaluates: bool, sft: bool) -> dict[str, float]:
    metrics = {
        "train/loss": math.exp(-step / 5),
        "train/grad_norm": math.nan if step == 2 else 1.0 + step % 3,
        "train/lr": 1e-4,
        "response_len/mean": 9.0 + step,
        "response_len/max": 20.0 + step,
        "time/rollout_s": 1.0,
        "time/train_s": 2.0,
        "time/step_s": 3.5,
        "throughput/tokens_per_s": 100.0 * step,
        "weights/version": step + 1.0,
    }
    if not sft:
        metrics |= {
            "reward/mean": step / 12,
            "logprob_diff/mean": 1e-7 * (step + 1),
            "train/entropy": 1.0,
            "train/kl": 0.1,
        }
    if evaluates:
        metrics |= {"eval/reward_mean": step / 12, "time/eval_s": 0.4}
    return metrics
