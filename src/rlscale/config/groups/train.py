"""Group `train`: settings of all training backends."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class TrainBackendName(StrEnum):
    """Training backends."""

    megatron = "megatron"
    fsdp = "fsdp"


class ComputeDtype(StrEnum):
    """Dtypes of the forward and backward pass."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class WeightChannelName(StrEnum):
    """Transports of the weights from trainer to engines."""

    process_group = "process_group"
    shared_memory = "shared_memory"
    disk = "disk"
    delta = "delta"


class QkvFormat(StrEnum):
    """Layouts of a micro-batch."""

    thd = "thd"
    bshd = "bshd"


class LoraSync(StrEnum):
    """Contents of a weight sync of a policy with adapters."""

    merged = "merged"
    adapter = "adapter"


@dataclass(kw_only=True)
class LoraConfig(ConfigGroup):
    """Low-rank adapters (LoRA, arXiv:2106.09685) from peft, which are trained instead of the weights.

    A weight W is used as W + alpha / rank * B A. Exports contain the sum; the adapters are also saved in peft format
    in the subfolder `adapter` of an export. They have no dropout, which would make old and new logprobs differ.
    """

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters. 0: no adapters; all weights are trained."""

    alpha: Annotated[int, Field(gt=0)] = 32
    """Scaling of the adapters: their output is multiplied by alpha / rank. No effect with rank 0."""

    target_modules: Annotated[list[str] | None, Field(min_length=1)] = None
    """Last name component of the linear layers that get adapters, e.g. `[q_proj, v_proj]`. In a model with experts
    only layers of attention may. None: all that may, except the output layer. No effect with rank 0.
    """

    load: Annotated[str | None, Field(min_length=1)] = None
    """Folder in peft format with the initial adapters. None: new adapters. No effect with rank 0."""

    sync: LoraSync = LoraSync.merged
    """Contents of a weight sync. `merged`: all weights, with the adapters added to them. `adapter`: the base once, then
    only the adapters, as versions of which an engine holds several: a request keeps the version that it begins with,
    and no engine is paused. With `rollout.engine=sglang` each version has its own name in the engines, `policy@3`. Not
    with external engines. No effect with rank 0.
    """

    shared_base: bool = False
    """Share engines between the jobs of a sweep with `hydra/launcher=ray`: jobs with the same model and engine settings
    use one set of engines, each job with its own adapters. The first job that needs the engines starts them, the last
    one stops them. Only with `train.lora.sync=adapter`, `rollout.engine=embedded` and without `cluster.colocate`. A run
    that is no job of a sweep starts its own engines. With `rollout.deterministic=true` samples are those of the job
    alone, to the last bit, and sharing saves less time; with false four small jobs generate 2.8 times as fast as one
    after another, instead of 1.5 times.
    """


@dataclass(kw_only=True)
class TrainConfig(ConfigGroup):
    """Settings of all training backends."""

    # Backend and dtype.
    backend: TrainBackendName = TrainBackendName.megatron
    """Training backend. It also sets the default of `optim.lr`."""

    dtype: ComputeDtype = ComputeDtype.bfloat16
    """Dtype of the forward and backward pass. Master weights and reductions are float32."""

    seed: Annotated[int, Field(ge=0)] = 1234
    """Random seed of the trainer ranks."""

    # Weight sync.
    update_weight_buffer_size: Annotated[int, Field(gt=0)] = 536870912
    """Bucket size of the weight sync, in bytes."""

    update_weights_interval: Annotated[int, Field(gt=0)] = 1
    """Number of rollouts between two weight syncs. Weights are also synced before each evaluation and after the last
    rollout. At most `rollout.max_staleness` + 1, because samples get older between two syncs.
    """

    weight_channel: WeightChannelName | None = None
    """Transport of the weights to the engines. `process_group`: collectives of torch.distributed. `shared_memory`:
    shared memory for engines on the machine of the trainer, or CUDA IPC for engines on its GPUs. `disk`: files in a
    folder that both can read. `delta`: like `disk`, with only the changed values. None: `shared_memory` with
    `cluster.colocate` (on a CPU on one node), `disk` where neither other channel is possible, else `process_group`.
    """

    weight_folder: Annotated[str | None, Field(min_length=1)] = None
    """Folder of the weight channels `disk` and `delta`, readable by trainer and engines. Its contents are deleted.
    None: `weights` in the run folder. No effect with other channels.
    """

    # Passes and kernels.
    reuse_logprobs: bool = True
    """Use the logprobs of the training forward pass as old logprobs where both are identical (one optimiser step per
    rollout). false: always run a separate pass.
    """

    share_prompts: bool = True
    """Compute a prefix that samples of a micro-batch share only once: their prompt, and the turns before they branch.
    Results are equal up to rounding. Only with `train.backend=fsdp`, packed sequences (`train.qkv_format=thd`) and
    `sdpa` attention.
    """

    true_on_policy_mode: bool = False
    """Run the trainer with the kernels and batch shapes of the embedded engine, so that both compute bit-identical
    logprobs; any difference ends the run. For research and debugging: a training step takes several times as long.
    """

    qkv_format: QkvFormat = QkvFormat.thd
    """Layout of a micro-batch. `thd`: packed sequences. `bshd`: sequences padded to one length, for kernels that do not
    support packing; cannot be combined with `batch.use_dynamic_batch_size`.
    """

    # Processes and memory.
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of the trainer processes, e.g. `train.env_vars.NCCL_DEBUG=INFO`. They override those of the
    driver. Variables whose names look like keys, tokens or passwords are set inside the process and do not appear in
    Ray logs.
    """

    memory_margin_bytes: Annotated[int, Field(ge=0)] = 1073741824
    """Memory of each GPU that stays free with `cluster.offload_train_mode=tms`, in bytes."""

    weights_backuper: bool = True
    """With `cluster.offload_train_mode=move`: keep the copies of all models in pinned host memory while the models are
    on the GPU, so unchanged models are offloaded without copying. false: free that host memory.
    """

    recompute_loss_function: bool = False
    """Recompute the loss function in the backward pass instead of keeping its activations; of the tensors with a
    vocabulary dimension only the logits are kept. No effect where logits are computed in chunks
    (`train.log_probs_chunk_size`), which keeps none of them, and with `train.backend=megatron`.
    """

    log_probs_chunk_size: Annotated[int, Field(ge=-1)] = -1
    """Number of tokens whose logits are in memory at once when logprobs and entropy are computed. Smaller values need
    less memory. -1 or 0: chosen by vocabulary size.
    """

    # Trained parameters.
    only_train_params: Annotated[list[str] | None, Field(min_length=1)] = None
    """Regular expressions: train only parameters whose name in transformers contains a match. The words `vision` and
    `projector` are the vision tower of a model with images and what maps its features to the decoder. With
    `train.backend=megatron` parameters that Megatron-core keeps in one tensor, such as the projections of queries, keys
    and values, must match together. The value head of a critic is always trained. Cannot be combined with
    `train.freeze_params`. None: all parameters are trained.
    """

    freeze_params: Annotated[list[str] | None, Field(min_length=1)] = None
    """Regular expressions: freeze parameters whose name contains a match, as in `train.only_train_params`. None: no
    parameter is frozen.
    """

    lora: LoraConfig = field(default_factory=LoraConfig)
    # Old policies and user code.
    keep_old_actor: bool = False
    """Keep the last `rollout.max_staleness` versions of the weights in host memory, and compute the old logprobs of
    each token with the version that generated it. No effect with `rollout.max_staleness=0`.
    """

    convert_samples_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that changes the batch which a rollout is trained as: tokens, masks,
    logprobs and rewards. None: the batch of its samples.
    """

    rollout_data_postprocess_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, a `PostprocessFunction` of `rlscale.hook_protocols`, called on each
    rank with its part of the batch after advantages are computed. It can change them. None: no function.
    """
