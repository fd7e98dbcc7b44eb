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
    """FSDP2. Ignored with another `train.backend`."""

    gradient_checkpointing: Annotated[
        bool, Field(description="Recompute activations in the backward pass: less memory, about a third more time.")
    ] = False
    attn_implementation: Annotated[
        AttnImplementation,
        Field(description="Attention kernel of the model. `flash_attention_2` becomes `sdpa` where there is no CUDA."),
    ] = AttnImplementation.flash_attention_2
    num_threads: Annotated[
        int | None,
        Field(gt=0, description="Threads torch uses in each rank on a CPU. None: cores of the node / its ranks."),
    ] = None
    context_parallel_size: Annotated[
        int,
        Field(
            gt=0,
            description="Ranks that share each sample (context parallelism): every one computes its part of the tokens "
            "and attends to the keys of all. A micro-batch holds as many times `batch.max_tokens_per_gpu`.",
        ),
    ] = 1
