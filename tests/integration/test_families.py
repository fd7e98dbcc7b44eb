"""Whole runs of families with other layers than Llama: the embedded engine generates, both trainers agree with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.models.random_weights import save_random_model
from rlscale.models.tiny_tokenizer import tiny_tokenizer
from tests.integration.conftest import REWARDED, SMALL, Command

MEGATRON = ("train=megatron", "train.dtype=float32")
# The second rollout is generated with weights that were sent; ci fails where versions or logprobs differ.
TWICE = ("data.num_rollout=2", "eval.interval=null", "eval.stop_reward=null", "ci.enabled=true", REWARDED)
SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
OTHER = tuple(each for each in SMALL if not each.startswith(("data.", "eval.", *(f"model.{name}" for name in SIZES))))

SHARED: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
# Prompts are longer than the window, and the limit clamps some of the gates.
GPT_OSS = {"model_type": "gpt_oss", "head_dim": 8, "intermediate_size": 32, "num_local_experts": 4}
GPT_OSS |= {"sliding_window": 4, "swiglu_limit": 0.5}
GPT_OSS["rope_parameters"] = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
GLM_LITE = {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}


def write_model(folder: Path, fields: dict[str, Any]) -> tuple[str, ...]:
    """Writes a model with random weights; returns the overrides that name it."""
    folder.mkdir()
    save_random_model(folder, SHARED | fields, tiny_tokenizer("tiny_qwen3", 512), seed=0)
    return "model=hf", f"model.hf_checkpoint={folder}", "model.use_hf_config_for_megatron=true"


def check_steps(command: Command, model_type: str) -> None:
    """Two steps were trained, engine and trainer have the same logprobs, and a model of the family was exported."""
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert [record["weights/version"] for record in steps] == [1, 2]
    assert all(0 <= record["logprob_diff/max"] < 1e-5 for record in steps), [r["logprob_diff/max"] for r in steps]
    assert all(record["train/grad_norm"] > 0 for record in steps)
    exported = json.loads((command.run_dir / "hf" / "config.json").read_text())
    assert exported["model_type"] == model_type


@pytest.mark.nightly
def test_deepseek_v3_on_fsdp(command: Command) -> None:
    sizes = ("model=tiny_deepseek_v3", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64")
    done = command.run("train=fsdp", *OTHER, *TWICE, *sizes, small=False)
    assert done.code == 0, done.err
    check_steps(command, "deepseek_v3")


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
@pytest.mark.parametrize("fields", [GPT_OSS, GLM_LITE], ids=["gpt_oss", "glm4_moe_lite"])
def test_both_trainers_agree_with_the_engine(
    command: Command, tmp_path: Path, fields: dict[str, Any], trainer: str
) -> None:
    model = write_model(tmp_path / "model", fields)
    own = MEGATRON if trainer == "megatron" else ("train=fsdp", "fsdp.attn_implementation=sdpa")
    done = command.run(*own, *OTHER, *TWICE, *model, small=False)
    assert done.code == 0, done.err
    check_steps(command, fields["model_type"])


QWEN3_NEXT = {"model_type": "qwen3_next", "head_dim": 8, "intermediate_size": 48, "num_experts": 4}
QWEN3_NEXT |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "rms_norm_eps": 1e-2}
QWEN3_NEXT |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
QWEN3_NEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FEATURES = {
    "critic": ("algo=ppo",),
    "routing replay": ("algo.use_rollout_routing_replay=true",),
    "adapters": ("train.lora.rank=4", "train.lora.sync=adapter"),
    "muon": ("optim.name=muon",),
}


@pytest.mark.nightly
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("fields", [GPT_OSS, QWEN3_NEXT], ids=["gpt_oss", "qwen3_next"])
def test_features_of_a_run_on_megatron(
    command: Command, tmp_path: Path, fields: dict[str, Any], features: tuple[str, ...]
) -> None:
    model = write_model(tmp_path / "model", fields)
    done = command.run(*MEGATRON, *OTHER, *TWICE, *model, *features, small=False)
    assert done.code == 0, done.err
    check_steps(command, fields["model_type"])
