"""Group `train`: what all training backends share."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.lora import LoraConfig
from rlscale.config.groups.patterns import DOTTED_PATH


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


class QkvFormat(StrEnum):
    """Layouts of a micro-batch."""

    thd = "thd"
    bshd = "bshd"


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
    true_on_policy_mode: Annotated[
        bool,
        Field(
            description="The trainer computes with the embedded engine's kernels, in its shapes, so that both give the "
            "same logprobs bit for bit; a run in which they differ ends. For research, and to find faults: a training "
            "step takes several times as long."
        ),
    ] = False
    qkv_format: Annotated[
        QkvFormat,
        Field(
            description="Layout of a micro-batch. `thd`: sequences packed one after the other. `bshd`: padded to one "
            "length, for kernels that cannot read packed ones; excludes `batch.use_dynamic_batch_size`."
        ),
    ] = QkvFormat.thd
    env_vars: Annotated[
        dict[str, str],
        Field(
            description="Environment variables of the trainer's processes, over those of the driver, e.g. "
            "`train.env_vars.NCCL_DEBUG=INFO`. Those whose names look like keys, tokens or passwords are set when a "
            "process begins its work, and are in no log of Ray's."
        ),
    ] = field(default_factory=dict)
    memory_margin_bytes: Annotated[
        int, Field(ge=0, description="Memory of each GPU that `cluster.offload_train_mode=tms` keeps free, in bytes.")
    ] = 1073741824
    weights_backuper: Annotated[
        bool,
        Field(
            description="With `cluster.offload_train_mode=move`: keep the copies of all models in pinned host memory "
            "while they have their turn on the GPU, so that those that did not change leave it without copying; false "
            "gives the host's memory back meanwhile."
        ),
    ] = True
    recompute_loss_function: Annotated[
        bool,
        Field(
            description="Compute the loss function again in the backward pass instead of keeping its activations: of a "
            "vocabulary in float32 the logits alone are kept. Where logits are made in chunks "
            "(`train.log_probs_chunk_size`) not even those are, with or without it."
        ),
    ] = False
    log_probs_chunk_size: Annotated[
        int,
        Field(
            ge=-1,
            description="Tokens whose logits over the whole vocabulary are in memory at once when logprobs and entropy "
            "are taken; fewer need less memory. -1 or 0: by the size of the vocabulary.",
        ),
    ] = -1
    only_train_params: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            description="Train only the parameters whose name one of these regular expressions is found in. Excludes "
            "`train.freeze_params`. None: all.",
        ),
    ] = None
    freeze_params: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            description="Leave the parameters as they are whose name one of these regular expressions is found in. "
            "None: none.",
        ),
    ] = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    keep_old_actor: Annotated[
        bool,
        Field(
            description="Keep the weights of the last `rollout.max_staleness` versions in host memory, and compute "
            "the old policy's logprobs of each token with those that generated it."
        ),
    ] = False
    rollout_data_postprocess_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, a `PostprocessFunction` of `rlscale.protocols`, "
            "called on each rank with its part of the batch once it has advantages; it may change them. None: none.",
        ),
    ] = None
