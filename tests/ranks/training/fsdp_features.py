"""Features of a trainer, each as a separate spec, for tests on one rank and on two. No tests here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.config import AttnImplementation, LrDecayStyle, MisConfig, MisLevel
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource, TrainerSpec
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, with_branches

BATCHES = [make_batch(RAGGED, seed=seed) for seed in range(2)]
BRANCHES = [with_branches(1, num_groups=2, group_size=4)]
TWO_STEPS = {
    1: ([[[0, 1, 2, 3]]], [[[4, 5, 6, 7]]]),
    2: ([[[0, 1], [2]], [[3], []]], [[[4]], [[7, 5, 6]]]),
}
"""Micro-batches of the two steps of a rollout by number of ranks; with one step all ratios would be 1."""

BOTH = {"use_tis": True, "tis_clip": 1.5}
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"grpo_std_normalization": False, "divide_by_max_response_len": True},
    "dapo": {"eps_clip_high": 0.28, "calculate_per_token_loss": True, "overlong_buffer_len": 30},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
    },
    "sft": {"loss_type": "sft_loss"},
    "entropy and dual clip": {"entropy_coef": 0.01, "eps_clip_c": 3.0},
    "icepop": {**BOTH, "tis_type": "icepop", "tis_clip": 20.0, "tis_clip_low": 0.05},
    "mis": {**BOTH, "tis_type": "mis", "mis": MisConfig(level=MisLevel.geometric, normalize=True, veto=0.01)},
    "decoupled": {"decoupled_loss": True},
    "opsm": {"opsm_delta": 0.01},
    "engine logprobs": {"use_rollout_logprobs": True},
}
FIELDS: Mapping[str, dict[str, Any]] = {
    "chosen parameters": {"only_train_params": ["mlp", "norm"]},
    "frozen parameters": {"freeze_params": ["embed_tokens"]},
    "checkpointing": {"gradient_checkpointing": True},
    "loss computed twice": {"recompute_loss_function": True},
    "logits in chunks": {"log_probs_chunk_size": 2},
    "prompts apart": {"share_prompts": False},
    "sdpa": {"attn_implementation": AttnImplementation.sdpa},
    "eager": {"attn_implementation": AttnImplementation.eager},
    "wsd": {"lr_decay_style": LrDecayStyle.wsd, "lr_warmup_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1},
}
"""Fields of the groups train, fsdp and optim."""

TREES: Mapping[str, dict[str, Any]] = {
    "tree": {"use_rollout_logprobs": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "tree by sequence": {"advantage_estimator": "gspo", "use_rollout_logprobs": True},
}
"""Samples that share prefixes, computed once on two ranks and apart on one."""

CRITICS: Mapping[str, dict[str, Any]] = {"critic": {"value_clip": 0.1}, "critic alone": {"num_only_rollouts": 1}}
FEATURES = (*ALGORITHMS, *FIELDS, *TREES, *CRITICS)


def feature_spec(name: str, model_path: str, *, world_size: int = 1) -> TrainerSpec:
    """Spec of a feature. With a small eps Adam would turn the rounding of vanishing gradients into full steps."""
    if name in TREES:
        shares = world_size > 1
        return spec(model_path, algo=TREES[name], adam_eps=1e-4, ref_path=model_path, share_prompts=shares)
    if name in CRITICS:
        critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2, **CRITICS[name])
        return spec(model_path, algo={"advantage_estimator": "ppo"}, critic=critic, adam_eps=1e-4)
    return spec(model_path, algo=ALGORITHMS.get(name), adam_eps=1e-4, **FIELDS.get(name, {}))


def train_feature(name: str, model_path: str, *, rank: int, world_size: int) -> list[dict[str, float]]:
    """Metrics of a rollout, with a critic of two, with two optimiser steps each."""
    backend = FsdpBackend(feature_spec(name, model_path, world_size=world_size), rank=rank, world_size=world_size)
    found = []
    batches = BRANCHES if name in TREES else BATCHES
    for batch in batches if name in CRITICS else batches[:1]:
        result = backend.train(batch, [plan(batch, cut) for cut in TWO_STEPS[world_size]])
        steps = {f"{i} {key}": value for i, step in enumerate(result.steps) for key, value in step.items()}
        found.append(steps | result.metrics)
    return found
