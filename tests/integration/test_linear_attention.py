"""A whole run of a model with gated delta nets on Megatron-core."""

import json
from pathlib import Path

import pytest

from rlscale.models.random_weights import save_random_model
from rlscale.models.tiny_tokenizer import tiny_tokenizer
from tests.integration.conftest import Command

CONFIG = Path(__file__).parents[1] / "data" / "qwen3_next" / "config.json"

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_a_supervised_run_trains_saves_and_exports(command: Command, tmp_path: Path) -> None:
    """Two rollouts on two tensor-parallel ranks that divide the experts. No engine of this machine has these layers."""
    config = json.loads(CONFIG.read_text())
    rope = {"rope_theta": config.pop("rope_theta"), "partial_rotary_factor": config.pop("partial_rotary_factor")}
    model = tmp_path / "model"
    model.mkdir()
    save_random_model(
        model, config | {"rope_parameters": {"rope_type": "default", **rope}}, tiny_tokenizer("tiny_qwen3", 512), seed=0
    )
    done = command.run(
        "experiment=quickstart_warmup",
        "train=megatron",
        "train.dtype=float32",
        "model=hf",
        f"model.hf_checkpoint={model}",
        "model.use_hf_config_for_megatron=true",
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
    records = [json.loads(line) for line in (command.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert (command.run_dir / "hf" / "model.safetensors").exists()
    assert list((command.run_dir / "checkpoints").iterdir())
