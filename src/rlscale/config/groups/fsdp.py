"""Group `fsdp`: the FSDP2 backend."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.train import ComputeDtype, QkvFormat, TrainConfig


class AttnImplementation(StrEnum):
    """Attention kernels of transformers."""

    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"
    sdpa = "sdpa"
    eager = "eager"


FLASH_ATTENTION = (AttnImplementation.flash_attention_2, AttnImplementation.flash_attention_3)
"""Kernels of separate packages, for GPUs and 16 bits only; each sample is computed separately."""


@dataclass(kw_only=True)
class FsdpConfig(ConfigGroup):
    """FSDP2. No effect with other `train.backend`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and takes about a third more time."""

    attn_implementation: AttnImplementation = AttnImplementation.flash_attention_2
    """Attention kernel. `flash_attention_2` (package `flash-attn`) and `flash_attention_3` (package `flash_attn_3`, for
    Hopper GPUs) fall back to `sdpa` without CUDA and in float32.
    """

    num_threads: Annotated[int | None, Field(gt=0)] = None
    """Number of torch threads per rank on a CPU. None: cores of the node / ranks on the node."""

    context_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Context-parallel size: number of ranks that share each sample. Each rank computes its part of the tokens and
    attends to the keys of all ranks. The token limit of a micro-batch is `batch.max_tokens_per_gpu` times this size.
    """


def shares_prefixes(train: TrainConfig, fsdp: FsdpConfig, *, device: str) -> bool:
    """Whether FSDP computes a prefix once for all samples of a micro-batch that begin with it.

    Args:
        train: the group.
        fsdp: the group.
        device: cpu, cuda, or auto if it is not known.
    """
    if not train.share_prompts or train.qkv_format != QkvFormat.thd or train.true_on_policy_mode:
        return False
    choice = fsdp.attn_implementation
    if choice in FLASH_ATTENTION and (device == "cpu" or train.dtype == ComputeDtype.float32):
        choice = AttnImplementation.sdpa
    # Context parallelism has its own attention.
    return choice == AttnImplementation.sdpa or fsdp.context_parallel_size > 1
