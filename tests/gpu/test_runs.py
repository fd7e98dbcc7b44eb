"""Runs of the real command on a GPU that trainer and engine share: backends, models, optimisers, offloading, resume."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import REWARDED, Command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ONE_GPU = (
    "cluster=one_gpu",
    "cluster.offload_train_mode=move",
    "fsdp.attn_implementation=sdpa",
    "eval.interval=null",
    "ci.enabled=true",
)
"""Kernels of torch alone: flash-attn may not be installed."""

EXACT, ROUNDED = 1e-4, 0.05
"""Largest mean difference of the logprobs of trainer and engine in float32 and bfloat16."""

BFLOAT16 = ("train.dtype=bfloat16",)
MIXTURE = (
    "model=tiny_qwen3_moe",
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
    "model.intermediate_size=null",
)
PICTURES = (
    "+experiment=quickstart_vision",
    "model=tiny_qwen3_vl",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.warmup_experiment=null",
    "batch.rollout_batch_size=4",
    "eval.stop_reward=null",
)
CRITIC = ("algo=ppo",)
MEMORY_SAVER = "cluster.offload_train_mode=tms"
GLOO = ("train.weight_channel=process_group", "cluster.distributed_backend=gloo")
KEPT = "cluster.offload_rollout=false"
REFERENCE = ("algo.use_kl_loss=true", "algo.kl_loss_coef=0.01")
CASES = {
    "memory-saver": (*BFLOAT16, MEMORY_SAVER),
    "memory-saver-disk": (MEMORY_SAVER, "train.weight_channel=disk", *REFERENCE),
    "memory-saver-critic": (MEMORY_SAVER, *GLOO, *CRITIC),
    "memory-saver-megatron": (MEMORY_SAVER, "train=megatron"),
    "no-offload": ("cluster.offload_train=false", "cluster.offload_rollout=false"),
    "bfloat16": BFLOAT16,
    "recomputed": ("fsdp.gradient_checkpointing=true", *BFLOAT16),
    "reference": REFERENCE,
    "critic": CRITIC,
    "adapters": ("train.lora.rank=4", "train.lora.sync=adapter", "optim.lr=1e-2", KEPT),
    "merged-adapters": (*BFLOAT16, "train.lora.rank=4", "optim.lr=1e-2"),
    "muon": ("optim.name=muon",),
    "experts": MIXTURE,
    "megatron": ("train=megatron",),
    "megatron-bfloat16": ("train=megatron", *BFLOAT16, *REFERENCE),
    "megatron-experts": ("train=megatron", *MIXTURE),
    "megatron-adapters": ("train=megatron", "train.lora.rank=4", "train.lora.sync=adapter", "optim.lr=1e-2", KEPT),
    "gloo": GLOO,
    "disk": ("train.weight_channel=disk",),
    "delta": ("train.weight_channel=delta", KEPT),
    "shared-prompts": (*BFLOAT16, "train.share_prompts=true"),
    "fast-engine": (*BFLOAT16, "rollout.deterministic=false"),
}


@pytest.fixture
def command(tmp_path: Path, cache: Path) -> Iterator[Command]:
    command = Command(folder=tmp_path, cache=cache)
    yield command
    command.kill()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("case", CASES)
def test_trainer_and_engine_agree_in_each_rollout(command: Command, case: str) -> None:
    overrides = CASES[case]
    done = command.run(REWARDED, *ONE_GPU, *overrides)
    check_run(command, done.code, done.err, limit=ROUNDED if BFLOAT16[0] in overrides else EXACT)


def test_pictures(command: Command) -> None:
    done = command.run(*PICTURES, "data.num_rollout=3", REWARDED, *ONE_GPU, small=False)
    check_run(command, done.code, done.err, limit=EXACT)


def test_an_agent_with_tools(command: Command) -> None:
    few = ("data.num_rollout=3", "batch.rollout_batch_size=4", "batch.n_samples_per_prompt=4", "eval.stop_reward=null")
    done = command.run("+experiment=calculator", "model.warmup_experiment=null", *few, REWARDED, *ONE_GPU, small=False)
    check_run(command, done.code, done.err, limit=EXACT)


def test_a_resumed_run_repeats_an_uninterrupted_one(command: Command) -> None:
    """To the rounding of kernels that add in any order."""
    save = ("checkpoint.save_interval=2", "optim=constant")
    done = command.run(REWARDED, *ONE_GPU, *save, "data.num_rollout=4")
    check_run(command, done.code, done.err, limit=EXACT, count=4)
    whole = command.metrics()
    first, resumed = (
        Command(folder=command.folder, cache=command.cache, name=name, mark=command.mark)
        for name in ("first", "resumed")
    )
    done = first.run(REWARDED, *ONE_GPU, *save, "data.num_rollout=2")
    assert done.code == 0, done.err
    done = resumed.run(REWARDED, *ONE_GPU, *save, "data.num_rollout=4", f"checkpoint.load={first.run_dir}")
    assert done.code == 0, done.err
    for a, b in zip(trained(whole)[2:], trained(resumed.metrics()), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-3, abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)


def check_run(command: Command, code: int, err: str, *, limit: float, count: int = 3) -> None:
    assert code == 0, f"{err}\n{command.describe()}"
    steps = trained(command.metrics())
    assert len(steps) == count and all(m["train/grad_norm"] > 0 for m in steps)
    assert all(m["logprob_diff/mean"] < limit for m in steps), [m["logprob_diff/mean"] for m in steps]
    assert command.left_over() == {}


def trained(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [m for m in metrics if "train/loss" in m]
