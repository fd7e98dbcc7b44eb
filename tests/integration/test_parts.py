"""Runs of one half of the loop: dumps, replay and rollout-only; user functions get their config and environment."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.conftest import REWARDED, Command

PLUG_INS = """
import os
import torch

def score(sample, custom):
    return {"scaled": custom["scale"] * len(sample.response), "length": len(sample.response)}

def loss(lp, tokens):
    seen = float(os.environ.get("SEEN_BY_TRAINERS", "0")) + float(os.environ.get("TRAINERS_TOKEN", "0"))
    count = tokens.mask.sum()
    return -lp * tokens.advantages, {"seen": (seen * count, count)}
"""

OVERRIDES = (
    "reward.custom_path=plug_ins:score",
    "reward.key=scaled",
    "custom.scale=3",
    "algo.loss_type=custom_loss",
    "algo.custom_loss_function_path=plug_ins:loss",
    "train.env_vars={SEEN_BY_TRAINERS: 7, TRAINERS_TOKEN: 0.5}",
    "eval.interval=null",
)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory, shared_ray: str) -> Command:
    """A run with every dump."""
    command = Command(folder=tmp_path_factory.mktemp("whole"), cache=cache, ray=shared_ray)
    (command.folder / "plug_ins.py").write_text(PLUG_INS)
    done = command.run(*OVERRIDES, "debug.dump_details=details")
    assert done.code == 0, done.err
    return command


def test_user_functions_get_custom_and_trainers_get_env_vars(whole: Command) -> None:
    steps = [record for record in whole.metrics() if "train/loss" in record]
    assert [record["train/seen"] for record in steps] == [7.5] * 3
    assert all(record["reward/mean"] == 3 * record["reward/length/mean"] for record in steps)
    assert all(record["reward/mean"] == record["reward/scaled/mean"] > 0 for record in steps)


@pytest.mark.nightly
def test_several_functions_score_training_and_evaluation(command: Command) -> None:
    (command.folder / "plug_ins.py").write_text(PLUG_INS)
    named = "{luck: random, style: plug_ins:score, right: exact_match}"
    done = command.run(
        "reward.type=null",
        f"reward.functions={named}",
        "reward.weights={luck: 1.0, style/scaled: 0.5}",
        "custom.scale=0.5",
        "algo.advantage_estimator=gdpo",
        "debug.dump_details=details",
    )
    assert done.code == 0, done.err
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert len(steps) == 3 and all(record["train/grad_norm"] > 0 for record in steps)
    for record in steps:
        parts = record["reward/luck/mean"], record["reward/style/scaled/mean"]
        assert record["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1])
        assert parts[1] == 0.5 * record["reward/style/length/mean"] > 0
    assert all("reward/right/mean" in record for record in steps)
    (sample, *_) = records(command.folder / "details" / "rollout_data" / "0.jsonl")
    assert sample["metadata"]["reward_weights"] == {"luck": 1.0, "style/scaled": 0.5}
    evaluated = [record["step"] for record in command.metrics() if "eval/reward_mean" in record]
    assert evaluated == [0, 1, 3]
    names = sorted(path.name for path in (command.folder / "details" / "rollout_data").glob("eval_*"))
    assert len(names) == len(evaluated) and names[0] == "eval_0.jsonl"
    held_out = records(command.folder / "details" / "rollout_data" / "eval_0.jsonl")
    assert {sample["version"] for sample in held_out} == {0} and all(sample["eval_set"] for sample in held_out)


def test_details_contain_samples_batches_and_the_tokenizer(whole: Command) -> None:
    details = whole.folder / "details"
    assert (details / "tokenizer" / "tokenizer.json").exists()
    for rollout_id in range(3):
        samples = records(details / "rollout_data" / f"{rollout_id}.jsonl")
        batch = load_file(details / "train_data" / f"{rollout_id}.safetensors")
        assert batch["tokens"].tolist() == [token for sample in samples for token in sample["tokens"]]
        assert batch["rewards"].tolist() == [sample["reward"] for sample in samples]
        answered = batch["loss_mask"] == 1
        assert np.allclose(batch["trainer_logprobs"][answered], batch["rollout_logprobs"][answered], atol=1e-4)
        assert batch["advantages"][answered].any() and not batch["advantages"][~answered].any()


def test_a_run_records_timelines_utilization_lag_and_its_end(whole: Command) -> None:
    steps = [record for record in whole.metrics() if "train/loss" in record]
    pages = records(whole.run_dir / "timelines.jsonl")
    outcomes = records(whole.run_dir / "ledger.jsonl")
    assert [page["step"] for page in pages] == [record["step"] for record in steps] == [0, 1, 2]
    for record, page, outcome in zip(steps, pages, outcomes, strict=True):
        assert record["throughput/mfu"] > 0 and record["driver/loop_lag_s_max"] >= 0
        assert record["trajectory/generate_s_mean"] > 0 and record["trajectory/queue_s_max"] > 0
        assert record["rollout/raw_reward"] == record["rollout/rewards"] == pytest.approx(record["reward/mean"])
        assert record["rollout/advantages"] == pytest.approx(0.0, abs=1e-5)
        kinds = {span[0] for group in page["groups"] for each in group["trajectories"] for span in each["spans"]}
        assert kinds >= {"queue", "generate", "grade"}
        first, _, last = outcome["trained"][0].partition("-")
        ids = [each["id"] for group in page["groups"] for each in group["trajectories"]]
        assert set(ids) <= set(range(int(first), int(last) + 1)) and len(ids) == len(set(ids)) <= 64
    (end,) = records(whole.run_dir / "ends.jsonl")
    assert (end["start"], end["reason"], end["text"]) == (1, "finished", "")


def test_a_replay_trains_on_the_same_samples_without_engines(whole: Command, command: Command) -> None:
    (command.folder / "plug_ins.py").write_text(PLUG_INS)
    template = whole.folder / "details" / "rollout_data" / "{rollout_id}.jsonl"
    done = command.run(*OVERRIDES, f'debug.load_rollout_data="{template}"')
    assert done.code == 0, done.err
    kept = ("train/loss", "train/grad_norm", "reward/mean", "response_len/mean")
    ours, theirs = (
        [[record[name] for name in kept] for record in each.metrics() if "train/loss" in record]
        for each in (command, whole)
    )
    assert ours == theirs
    assert not list((command.run_dir / "logs").glob("engine*"))
    assert command.left_over() == {}


@pytest.mark.nightly
def test_a_rollout_only_run_starts_at_start_rollout_id(whole: Command, command: Command) -> None:
    (command.folder / "plug_ins.py").write_text(PLUG_INS)
    dump = command.folder / "{rollout_id}.jsonl"
    alone = ("debug.rollout_only=true", "data.start_rollout_id=1", f'debug.save_rollout_data="{dump}"')
    done = command.run(*OVERRIDES, *alone)
    assert done.code == 0, done.err
    metrics = command.metrics()
    assert [record["step"] for record in metrics] == [1, 2] and not any("train/loss" in record for record in metrics)
    for rollout_id in (1, 2):
        samples = records(command.folder / f"{rollout_id}.jsonl")
        expected = records(whole.folder / "details" / "rollout_data" / f"{rollout_id}.jsonl")
        names = ("sample_index", "group_index", "prompt_index", "prompt", "seed")
        assert [[sample[name] for name in names] for sample in samples] == [
            [sample[name] for name in names] for sample in expected
        ]
        assert all(sample["version"] == 0 for sample in samples)
    assert not (command.folder / "0.jsonl").exists()
    assert not list((command.run_dir / "logs").glob("actor*"))
    assert command.left_over() == {}


@pytest.mark.nightly
def test_a_run_that_starts_later_trains_the_remaining_rollouts(whole: Command, command: Command) -> None:
    (command.folder / "plug_ins.py").write_text(PLUG_INS)
    dump = command.folder / "{rollout_id}.jsonl"
    done = command.run(*OVERRIDES, "data.start_rollout_id=2", f'debug.save_rollout_data="{dump}"')
    assert done.code == 0, done.err
    (step,) = [record for record in command.metrics() if "train/loss" in record]
    assert step["step"] == 2 and step["weights/version"] == 3
    rows = [sample["prompt_index"] for sample in records(command.folder / "2.jsonl")]
    expected = records(whole.folder / "details" / "rollout_data" / "2.jsonl")
    assert rows == [sample["prompt_index"] for sample in expected]


@pytest.mark.nightly
def test_ci_checks_pass_and_the_run_fails_for_its_metric(command: Command) -> None:
    overrides = ("ci.enabled=true", "algo.use_kl_loss=true", "algo.kl_loss_coef=0.1")
    done = command.run(*overrides, "ci.metric_checker_key=reward/mean", "ci.metric_checker_threshold=2")
    assert done.code == 1
    assert "the run failed: reward/mean must reach 2 (ci.metric_checker_threshold) at least once, got" in done.err
    assert "Traceback" not in done.err
    assert [record["step"] for record in command.metrics() if "train/loss" in record] == [0, 1, 2]
    assert json.loads((command.run_dir / "finished.json").read_text())["num_rollouts"] == 3


@pytest.mark.nightly
def test_responses_are_cut_where_the_context_ends(command: Command) -> None:
    """Prompts of 8 tokens leave 4 of a context of 12; the limit of a response is 8."""
    done = command.run(
        REWARDED,
        "debug.rollout_only=true",
        'debug.save_rollout_data="dump/{rollout_id}.jsonl"',
        "eval.interval=null",
        "rollout.max_context_len=12",
        "rollout.sampling_params.ignore_eos=true",
        "rollout.sampling_params.repetition_penalty=1.5",
        "data.num_rollout=1",
    )
    assert done.code == 0, done.err
    samples = records(command.folder / "dump" / "0.jsonl")
    assert samples and {len(sample["tokens"]) for sample in samples} == {12}
    assert "so logprob_diff/* contains this difference" in done.out + done.err
