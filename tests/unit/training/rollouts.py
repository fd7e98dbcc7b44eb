"""Tiny models, batches and plans for the tests of the trainer. No tests here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.config import AlgoConfig, ComputeDtype, FsdpConfig, ModelBuild, ModelConfig, OptimConfig, TrainConfig
from rlscale.models.resolve_model import resolve_model
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch


def tiny_model(cache: Path, *, seed: int = 0, tied: bool = True, num_layers: int = 2) -> str:
    """A Qwen3 of two layers with grouped key heads, about 20 thousand parameters."""
    config = ModelConfig(
        build=ModelBuild.tiny_qwen3,
        init_seed=seed,
        cache_dir=str(cache),
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return resolve_model(config)


def tiny_moe(cache: Path) -> str:
    """Like `tiny_model`, with 4 experts in a layer, of which a token chooses 2."""
    config = ModelConfig(
        build=ModelBuild.tiny_qwen3_moe,
        cache_dir=str(cache),
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
    )
    return resolve_model(config)


def tiny_latent(cache: Path) -> str:
    """A DeepSeek-V3 of two layers, the second one with 8 experts, of which a token chooses 4 from 2 of 4 groups."""
    config = ModelConfig(
        build=ModelBuild.tiny_deepseek_v3,
        cache_dir=str(cache),
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=16,
    )
    return resolve_model(config)


def spec(model_path: str, *, algo: dict[str, Any] | None = None, **changes: Any) -> TrainerSpec:
    """float32, constant learning rate, no warm-up. `algo` are fields of AlgoConfig, `changes` of the other groups."""
    optim = {k: changes.pop(k) for k in list(changes) if k in OptimConfig.__dataclass_fields__}
    train = {k: changes.pop(k) for k in list(changes) if k in TrainConfig.__dataclass_fields__}
    fsdp = {k: changes.pop(k) for k in list(changes) if k in FsdpConfig.__dataclass_fields__}
    made = TrainerSpec(
        model_path=model_path,
        train=TrainConfig(**{"dtype": ComputeDtype.float32, **train}),
        fsdp=FsdpConfig(**{"num_threads": 1, **fsdp}),
        optim=OptimConfig(**{"lr": 1e-2, "warmup_ratio": 0.0, **optim}),
        algo=AlgoConfig(**(algo or {})),
        temperature=1.0,
        max_response_len=70,
        total_steps=10,
        device="cpu",
    )
    return replace(made, **changes)


def make_batch(lengths: Sequence[tuple[int, int]], *, group_size: int = 4, seed: int = 0) -> TrainBatch:
    """Samples of (prompt, response) lengths with random tokens and rewards; every response token is trainable."""
    rng = np.random.default_rng(seed)
    prompt_lens = np.array([p for p, _ in lengths], dtype=np.int32)
    totals = np.array([p + r for p, r in lengths], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(totals)))
    num_tokens, num_samples = int(offsets[-1]), len(lengths)
    positions = np.arange(num_tokens) - np.repeat(offsets[:-1], totals)
    is_response = positions >= np.repeat(prompt_lens, totals)
    return TrainBatch(
        tokens=rng.integers(0, 14, num_tokens).astype(np.int32),
        loss_mask=is_response.astype(np.uint8),
        rollout_logprobs=np.where(is_response, -2.5, 0.0).astype(np.float32),
        weight_versions=np.where(is_response, 0, -1).astype(np.int32),
        offsets=offsets,
        prompt_lens=prompt_lens,
        rewards=rng.random(num_samples).astype(np.float32),
        group_ids=np.arange(num_samples, dtype=np.int64) // group_size,
        trajectory_ids=np.arange(num_samples, dtype=np.int64),
        version=0,
    )


def plan(batch: TrainBatch, microbatches: Sequence[Sequence[Sequence[int]]]) -> StepPlan:
    """A step of the given [rank][micro-batch] -> samples."""
    samples = [i for rank in microbatches for micro in rank for i in micro]
    counts = [int(batch.loss_mask[batch.offsets[i] : batch.offsets[i + 1]].sum()) for i in samples]
    executions = {int(batch.trajectory_ids[i]) for i, count in zip(samples, counts, strict=True) if count}
    return StepPlan(
        microbatches=tuple(tuple(tuple(micro) for micro in rank) for rank in microbatches),
        num_trajectories=len(executions),
        num_tokens=sum(counts),
    )


RAGGED = [(3, 2), (5, 1), (2, 9), (4, 4), (3, 30), (6, 70), (2, 2), (4, 4)]
"""Lengths on both sides of the limits inside the packed attention."""

SHARED = [(5, 3), (5, 9), (5, 0), (5, 70), (7, 2), (7, 4), (3, 6), (90, 5), (90, 5)]
PROMPT_OF = [0, 0, 0, 0, 4, 4, 6, 7, 7]
"""The first sample with the same prompt: groups of four, two and one, and one whose samples have equal lengths."""


def with_equal_prompts(*, seed: int = 0) -> TrainBatch:
    """A batch of `SHARED`."""
    batch = make_batch(SHARED, seed=seed)
    tokens = batch.tokens.copy()
    for i, first in enumerate(PROMPT_OF):
        start, source, length = batch.offsets[i], batch.offsets[first], batch.prompt_lens[i]
        tokens[start : start + length] = tokens[source : source + length]
    return replace(batch, tokens=tokens)


def with_branches(seed: int, *, num_groups: int = 2, group_size: int = 5, max_len: int = 40) -> TrainBatch:
    """Groups whose samples leave earlier samples of their group at random tokens.

    Some are further paths of the trajectory that they leave, and do not train its tokens again. Others have their own
    trajectory, and train tokens that they share, too. Given tokens, e.g. of tools, are trained in none.
    """
    rng = np.random.default_rng(seed)
    lengths, tokens, masks, trajectories = [], [], [], []
    for _ in range(num_groups):
        prompt_len, first = int(rng.integers(1, 10)), len(tokens)
        prompt = rng.integers(0, 14, prompt_len)
        for number in range(group_size):
            own = rng.integers(0, 14, int(rng.integers(0, max_len)))
            own_mask = rng.random(len(own)) < 0.8
            before, before_mask, trajectory = prompt, np.zeros(prompt_len, dtype=bool), len(tokens)
            if number:
                left = int(rng.integers(first, len(tokens)))
                cut = int(rng.integers(prompt_len, len(tokens[left]) + 1))
                before, before_mask = tokens[left][:cut], masks[left][:cut]
                if rng.random() < 0.5:
                    trajectory, before_mask = trajectories[left], np.zeros(cut, dtype=bool)
            tokens.append(np.concatenate((before, own)))
            masks.append(np.concatenate((before_mask, own_mask)))
            trajectories.append(trajectory)
            lengths.append((prompt_len, len(tokens[-1]) - prompt_len))
    batch = make_batch(lengths, group_size=group_size, seed=seed)
    mask = np.concatenate(masks).astype(np.uint8)
    logprobs = rng.uniform(-3.5, -2, len(mask)) * mask
    ids = np.asarray(trajectories, dtype=np.int64)
    return replace(
        batch,
        tokens=np.concatenate(tokens).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs.astype(np.float32),
        rewards=batch.rewards[ids],
        trajectory_ids=ids,
    )
