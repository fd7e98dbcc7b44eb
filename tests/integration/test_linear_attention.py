"""Whole runs of models with gated delta nets: supervised, and with the embedded engine on both trainers."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Command
from tests.integration.test_families import MEGATRON, OTHER, TWICE, check_steps, write_model

NEXT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "qwen3_next" / "config.json").read_text())
ROTARY = ("rope_theta", "partial_rotary_factor")
NEXT = {name: value for name, value in NEXT.items() if name not in ROTARY} | {
    "rope_parameters": {"rope_type": "default", **{name: NEXT[name] for name in ROTARY}}
}
MOE = NEXT | {"model_type": "qwen3_5_moe_text"}
DENSE = {name: value for name, value in NEXT.items() if "expert" not in name and "mlp_only" not in name}
DENSE |= {"model_type": "qwen3_5_text", "tie_word_embeddings": True}
FSDP = ("train=fsdp", "train.qkv_format=bshd", "batch.use_dynamic_batch_size=false")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly
def test_qwen3_next_on_fsdp(command: Command, tmp_path: Path) -> None:
    done = command.run(*FSDP, *OTHER, *TWICE, *write_model(tmp_path / "model", NEXT), small=False)
    assert done.code == 0, done.err
    check_steps(command, "qwen3_next")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "trainer"),
    [(NEXT, MEGATRON), (MOE, MEGATRON), (MOE, FSDP), (DENSE, FSDP)],
    ids=["qwen3_next-megatron", "qwen3_5_moe-megatron", "qwen3_5_moe-fsdp", "qwen3_5-fsdp"],
)
def test_the_engine_agrees_with_the_trainer(
    command: Command, tmp_path: Path, fields: dict[str, Any], trainer: tuple[str, ...]
) -> None:
    done = command.run(*trainer, *OTHER, *TWICE, *write_model(tmp_path / "model", fields), small=False)
    assert done.code == 0, done.err
    check_steps(command, fields["model_type"])


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_killed_run_continues_with_the_same_numbers(command: Command, tmp_path: Path) -> None:
    keys = (*FSDP, *OTHER, *TWICE, "data.num_rollout=6", "checkpoint.save_interval=1")
    keys = (*keys, *write_model(tmp_path / "model", NEXT))
    whole = Command(folder=tmp_path, cache=command.cache, name="whole", mark=command.mark)
    done = whole.run(*keys, small=False)
    assert done.code == 0, done.err
    process, end = command.start(*keys, small=False), time.monotonic() + 240
    while not list(command.run_dir.glob("checkpoints/rollout_0000000[1-4]/checkpoint.json")):
        assert process.poll() is None and time.monotonic() < end, "no checkpoint was written"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = command.run(*keys, small=False)
    assert done.code == 0, done.err
    names = ("step", "train/loss", "train/grad_norm", "logprob_diff/max")
    found, expected = (
        [[record[name] for name in names] for record in run.metrics() if "train/loss" in record]
        for run in (command, whole)
    )
    assert len(expected) == 6 and found == expected


@pytest.mark.nightly
def test_a_supervised_run_trains_saves_and_exports(command: Command, tmp_path: Path) -> None:
    """Two rollouts on two tensor-parallel ranks that divide the experts."""
    done = command.run(
        "experiment=quickstart_warmup",
        *MEGATRON,
        *write_model(tmp_path / "model", NEXT),
        "cluster.actor_num_gpus_per_node=2",
        "megatron.tensor_model_parallel_size=2",
        "megatron.sequence_parallel=true",
        "megatron.expert_model_parallel_size=2",
        "megatron.expert_tensor_parallel_size=1",
        "data.num_rollout=2",
        "eval.interval=null",
        "eval.stop_reward=null",
        "batch.rollout_batch_size=8",
        small=False,
        timeout_s=500,
    )
    assert done.code == 0, done.err
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert (command.run_dir / "hf" / "model.safetensors").exists()
    assert list((command.run_dir / "checkpoints").iterdir())
