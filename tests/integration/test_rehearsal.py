"""Rehearsals of the recipes: each trains two rollouts in its own layout on this machine."""

import json

import pytest

from tests.integration.conftest import Command
from tests.recipes import AGENT_EXAMPLES, CUT, RUNNABLE

IN_CI = ("qwen3_30b_a3b_gspo", "qwen3_4b_grpo")
"""A Megatron-core recipe with expert parallelism and an engine of 8 GPUs, and an FSDP recipe with separate engines."""

pytestmark = [pytest.mark.slow, pytest.mark.own_ray, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("experiment", "overlay"),
    [
        *((name, "rehearsal") for name in IN_CI),
        *(pytest.param(name, "rehearsal", marks=pytest.mark.nightly) for name in RUNNABLE if name not in IN_CI),
        *(pytest.param(name, "[qwen3_4b,rehearsal]", marks=pytest.mark.nightly) for name in AGENT_EXAMPLES),
    ],
)
def test_a_recipe_trains_two_rollouts_in_its_own_layout(command: Command, experiment: str, overlay: str) -> None:
    done = command.run(f"experiment={experiment}", f"on={overlay}", small=False, timeout_s=1100)
    assert done.code == 0, done.err
    assert f"rehearsed {experiment}: " in done.err
    assert "GPUs, NCCL, memory and speed" in done.err
    # Supervised training has no engines; it learns from labels.
    assert ("every weight, each compared by checksum" in done.err) != ("2 batches of labels" in done.err)
    report = json.loads((command.run_dir / "rehearsal.json").read_text())
    # Smaller parallel sizes may leave more replicas.
    sizes = {name: (old, new) for name, old, new in report["cuts"] if name != "data-parallel size"}
    assert bool(report["cuts"]) == (experiment in CUT) and all(old > new for old, new in sizes.values())
    assert 0 < report["peak_bytes"] < 20e9 and report["processes"] <= 32
    records = [json.loads(line) for line in (command.run_dir / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert steps and all(record["train/grad_norm"] > 0 for record in steps)
    assert (command.run_dir / "run" / "hf" / "model.safetensors").exists()
    assert list((command.run_dir / "run" / "checkpoints").iterdir())
    assert not command.left_over()


@pytest.mark.nightly
def test_eight_nodes_become_two_with_engines_on_several_nodes(command: Command) -> None:
    """Engines of 16 GPUs: a server on each of two nodes, of which the second one answers no requests."""
    given = ("experiment=qwen3_30b_a3b_gspo", "cluster=eight_nodes_colocate", "batch.global_batch_size=256")
    given += ("cluster.rollout_num_gpus_per_engine=16", "megatron.pipeline_model_parallel_size=2")
    done = command.run(*given, "on=rehearsal", small=False, timeout_s=1100)
    assert done.code == 0, done.err
    assert "cut: cluster.actor_num_nodes 8 -> 2" in done.err
    run = command.run_dir / "run"
    records = {file.name: json.loads(file.read_text()) for file in (run / "logs").glob("*_launch.json")}
    assert sorted(records) == ["engine_0_launch.json", "engine_0_node_1_launch.json"]
    ranks = [record["arguments"]["node_rank"] for _, record in sorted(records.items())]
    assert ranks == [0, 1]
    assert all(record["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7" for record in records.values())
    # The plan of the uncut run has all four engines.
    plan = json.loads((command.run_dir / "launch_plan.json").read_text())
    assert [len(engine) for engine in plan] == [2, 2, 2, 2]
