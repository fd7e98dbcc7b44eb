"""Group `train`: what all training backends share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.group import ConfigGroup


class TrainBackendName(StrEnum):
    """Training backends."""

    megatron = "megatron"
    fsdp = "fsdp"


class ComputeDtype(StrEnum):
    """Number formats of the trainer's computation."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(kw_only=True)
class TrainConfig(ConfigGroup):
    """Training."""

    backend: Annotated[TrainBackendName, Field(description="Training backend; decides the default of `optim.lr`.")] = (
        TrainBackendName.megatron
    )
    dtype: Annotated[
        ComputeDtype,
        Field(description="Number format of the forward and backward pass; master weights and reductions are float32."),
    ] = ComputeDtype.bfloat16
    seed: Annotated[int, Field(ge=0, description="Seed of the trainer ranks.")] = 1234
    update_weight_buffer_size: Annotated[
        int, Field(gt=0, description="Size of a bucket of the weight sync, in bytes.")
    ] = 536870912
    reuse_logprobs: Annotated[
        bool,
        Field(
            description="Take the old policy's logprobs from the training forward pass where that is exact (one "
            "optimiser step per rollout); false always makes the extra pass."
        ),
    ] = True
