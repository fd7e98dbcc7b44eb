"""Small models, batches and worlds of one rank, for checks that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.config import (
    AlgoConfig,
    AttnImplementation,
    BatchConfig,
    ComputeDtype,
    FsdpConfig,
    ModelBuild,
    ModelConfig,
    OptimConfig,
    TrainBackendName,
    TrainConfig,
)
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.models.resolve_model import resolve_model
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.spec import TrainerSpec
from rlscale.types import Group, Prompt, Sample, SampleStatus, StepPlan, TrainBatch

GROUP_SIZE = 4
TIMEOUT_S = 60.0

RAGGED = ((3, 2), (5, 1), (2, 9), (4, 4), (3, 30), (6, 70), (2, 2), (100, 200))
"""(prompt, response) lengths on both sides of the limits inside the packed attention."""


def build_tiny_model(models: Path, **fields: Any) -> str:
    """A random Qwen3 of two layers, or of the given fields of `model`, built once in `models`; returns its folder."""
    small = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    return resolve_model(ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(models), **{**small, **fields}))


def build_spec(
    model_path: str, *, device: str, dtype: ComputeDtype = ComputeDtype.float32, **train: Any
) -> TrainerSpec:
    """A trainer of one rank on FSDP2. `train` are fields of the config group."""
    return TrainerSpec(
        model_path=model_path,
        train=TrainConfig(**{"backend": TrainBackendName.fsdp, "dtype": dtype, **train}),
        # The kernels that come with torch: flash-attn may not be installed.
        fsdp=FsdpConfig(attn_implementation=AttnImplementation.sdpa),
        optim=OptimConfig(lr=1e-3, warmup_ratio=0.0),
        algo=AlgoConfig(),
        temperature=1.0,
        max_response_len=max(response for _, response in RAGGED),
        total_steps=10,
        device=device,
    )


def with_checkpointing(spec: TrainerSpec) -> TrainerSpec:
    """A spec that recomputes activations in the backward pass."""
    return replace(spec, fsdp=replace(spec.fsdp, gradient_checkpointing=True))


def build_random_batch(lengths: Sequence[tuple[int, int]], *, vocab_size: int, seed: int = 0) -> TrainBatch:
    """Samples of (prompt, response) lengths with random tokens and rewards, in groups of four.

    Without token 0, the padding: transformers gives its embedding no gradient, Megatron-core does.
    """
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for index, (prompt_len, response_len) in enumerate(lengths):
        if index % GROUP_SIZE == 0:
            groups.append(
                Group(index=len(groups), prompt=Prompt(index=len(groups), text="", token_ids=(0,)), samples=[])
            )
        token_ids = tuple(rng.integers(1, vocab_size, prompt_len).tolist())
        prompt = Prompt(index=index, text="", token_ids=token_ids)
        sample = Sample(index=index, group_index=index // GROUP_SIZE, prompt=prompt, seed=0, reward=float(rng.random()))
        sample.append(
            rng.integers(1, vocab_size, response_len).tolist(),
            logprobs=[-float(np.log(vocab_size))] * response_len,
            weight_versions=[0] * response_len,
        )
        sample.status = SampleStatus.completed
        groups[-1].samples.append(sample)
    return build_batch(groups, version=0)


def plan_one_step(batch: TrainBatch, *, max_tokens: int) -> list[StepPlan]:
    """One optimiser step over the batch, in micro-batches of at most `max_tokens`."""
    config = BatchConfig(
        rollout_batch_size=batch.num_samples, use_dynamic_batch_size=True, max_tokens_per_gpu=max_tokens
    )
    return plan_steps(batch, config, num_ranks=1)


@contextmanager
def world_of_one(device: str) -> Iterator[None]:
    """The default process group with this process alone."""
    join_world(0, 1, "127.0.0.1", 0, "nccl" if device == "cuda" else "gloo", TIMEOUT_S)
    try:
        yield
    finally:
        leave_world()
