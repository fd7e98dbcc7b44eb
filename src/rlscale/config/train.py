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


class WeightChannelName(StrEnum):
    """Ways of the weights from the trainer to the engines."""

    process_group = "process_group"
    shared_memory = "shared_memory"
    disk = "disk"
    delta = "delta"


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
    update_weights_interval: Annotated[
        int,
        Field(
            gt=0,
            description="Bring the weights to the engines after every so many rollouts, before each evaluation and "
            "after the last rollout. In between samples grow older, so it may exceed `rollout.max_staleness` by 1 at "
            "most.",
        ),
    ] = 1
    weight_channel: Annotated[
        WeightChannelName | None,
        Field(
            description="Way of the weights to the engines. `shared_memory`: engines on the trainer's machine (on its "
            "GPUs by CUDA IPC); `disk`: a folder both see; `delta`: there too, only what changed. None: "
            "`shared_memory` with `cluster.colocate` on one node, else `process_group`."
        ),
    ] = None
    weight_folder: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder of the weight channels `disk` and `delta`, seen by trainer and engines; what is in it "
            "is removed. None: `weights` in the run folder.",
        ),
    ] = None
    reuse_logprobs: Annotated[
        bool,
        Field(
            description="Take the old policy's logprobs from the training forward pass where that is exact (one "
            "optimiser step per rollout); false always makes the extra pass."
        ),
    ] = True
    share_prompts: Annotated[
        bool,
        Field(
            description="Compute a prompt once for all samples of a micro-batch that begin with it; false computes it "
            "for each. The same numbers up to rounding. With the packed attention of `sdpa` only."
        ),
    ] = True
