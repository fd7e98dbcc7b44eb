"""Group `fsdp`: the FSDP2 backend."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class AttnImplementation(StrEnum):
    """Attention kernels of transformers."""

    flash_attention_2 = "flash_attention_2"
    sdpa = "sdpa"
    eager = "eager"


@dataclass(kw_only=True)
class FsdpConfig(ConfigGroup):
    """FSDP2. No effect with other `train.backend`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and takes about a third more time."""

    attn_implementation: AttnImplementation = AttnImplementation.flash_attention_2
    """Attention kernel. `flash_attention_2` falls back to `sdpa` without CUDA and in float32."""

    num_threads: Annotated[int | None, Field(gt=0)] = None
    """Number of torch threads per rank on a CPU. None: cores of the node / ranks on the node."""

    context_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Context-parallel size: number of ranks that share each sample. Each rank computes its part of the tokens and
    attends to the keys of all ranks. The token limit of a micro-batch is `batch.max_tokens_per_gpu` times this size.
    """
