"""Policy gradients from samples of a low-precision engine, with and without truncated importance weights.

No benchmark itself; `low_precision.py` runs it. Shape legend: S samples of a chunk, L positions, R response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lora_regret_run import LocalEngine
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rlscale.algo.advantages import normalize_by_group
from rlscale.architectures.low_precision import is_quantized
from rlscale.config import load_config
from rlscale.driver.prepared_run import prepare_run
from rlscale.models.quantized_weights import QuantizedWeight
from rlscale.rollout.generate_session import group_seed
from rlscale.rollout.generated import sampling_params
from rlscale.types import Group, Prompt

REFERENCE, MEASURED = "reference", "measured"
"""Names of two sets of sampling seeds. Those of the second are the same for every engine."""

TIS_CLIP, CHUNK = 2.0, 512
Row = dict[str, Any]


def compare_gradients(model: Path, *, num_prompts: int, num_samples: int) -> list[Row]:
    """Compares the GRPO gradient of engines at the weights of a model with that of the exact engine and other seeds.

    Args:
        model: folder of the weights, in float32.
        num_prompts, num_samples: of every estimate: training prompts, and samples of each.

    Returns:
        A row for the exact engine, and two for each precision: `cosine` and `error`, the norm of the difference over
        that of the reference.
    """
    given = ["experiment=quickstart", "model=hf", f"model.hf_checkpoint={model}", "model.warmup_experiment=null"]
    config = load_config([*given, "rollout.deterministic=false", "rollout.num_slots=256"])
    prompts = prepare_run(config, str(model)).prompts.take(num_prompts)
    policy, params = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), sampling_params(config.rollout)
    weights = load_file(model / "model.safetensors")
    engine = LocalEngine(config, model)

    def sample(prompts: Sequence[Prompt], seeds: str, precision: str | None) -> list[Group]:
        engine.write(weights if precision is None else round_weights(weights, precision))
        numbers = [group_seed(1, seeds, i) for i in range(len(prompts))]
        return engine.generate(prompts, numbers, params, num_samples=num_samples, version=0)

    try:
        reference = gradient(policy, sample(prompts, REFERENCE, None), tis=False)
        rows = []
        for precision in (None, "fp8", "int4"):
            groups = sample(prompts, MEASURED, precision)
            for tis in (False, True) if precision is not None else (False,):
                found = gradient(policy, groups, tis=tis)
                cosine = torch.nn.functional.cosine_similarity(found, reference, dim=0)
                error = (found - reference).norm() / reference.norm()
                rows.append({"precision": precision, "tis": tis, "cosine": cosine.item(), "error": error.item()})
    finally:
        engine.close()
    return rows


def round_weights(weights: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """The weights as an engine of a precision multiplies with them."""
    return {
        name: QuantizedWeight(name, each, precision).dense() if is_quantized(name) else each
        for name, each in weights.items()
    }


def gradient(policy: Any, groups: Sequence[Group], *, tis: bool) -> Tensor:
    """The gradient of the GRPO loss at the first step of a rollout, as one vector.

    Args:
        policy: the model that is trained, without dropout.
        tis: weight each token by min(policy / engine, 2).
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    group_ids = torch.tensor([sample.group_index for sample in samples])
    advantages = normalize_by_group(rewards, group_ids_S=group_ids, divide_by_std=True)
    num_tokens = sum(sample.response_len for sample in samples)
    policy.zero_grad()
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        ids_SL = pad_sequence([torch.tensor(sample.tokens, dtype=torch.int64) for sample in chunk], batch_first=True)
        # Padding is at the end, which causal attention hides from every token that counts.
        logprobs_SL = policy(ids_SL[:, :-1]).logits.log_softmax(-1).gather(-1, ids_SL[:, 1:, None]).squeeze(-1)
        loss = torch.zeros(())
        for i, sample in enumerate(chunk):
            # Position t has the logprob of token t + 1.
            own_R = logprobs_SL[i, sample.prompt_len - 1 : len(sample.tokens) - 1]
            ratio_R = (own_R.detach() - torch.from_numpy(sample.rollout_logprobs)).exp()
            weights_R = ratio_R.clamp(max=TIS_CLIP) if tis else torch.ones_like(ratio_R)
            loss = loss - advantages[start + i] * (weights_R * own_R).sum() / num_tokens
        loss.backward()
    return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
