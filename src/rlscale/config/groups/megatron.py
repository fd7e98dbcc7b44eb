"""Group `megatron`: the Megatron-core backend."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class RecomputeGranularity(StrEnum):
    """Activations that are recomputed in the backward pass."""

    full = "full"
    selective = "selective"


class RopeType(StrEnum):
    """Types of rotary embedding."""

    rope = "rope"
    yarn = "yarn"


@dataclass(kw_only=True)
class MegatronConfig(ConfigGroup):
    """Megatron-core. Any field of its TransformerConfig or OptimizerConfig is also a key.

    No effect with other `train.backend`. Fields that rlscale sets, or that cannot work in a run, are refused.
    """

    passthrough_field = "core_args"

    # Parallel sizes.
    tensor_model_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Tensor-parallel size: number of ranks that share the matrices of each layer."""

    pipeline_model_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Pipeline-parallel size: number of stages of consecutive layers."""

    context_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Context-parallel size: number of ranks that share each sequence. The token limit of a packed micro-batch is
    `batch.max_tokens_per_gpu` times this size.
    """

    expert_model_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Expert-parallel size: number of ranks that the experts are distributed over."""

    # Memory and checkpoints.
    recompute_granularity: RecomputeGranularity | None = None
    """Activation recomputation. `full`: whole layers. `selective`: only core attention. None: all activations are kept.
    """

    use_distributed_optimizer: bool = True
    """Shard master weights and optimiser state over the data-parallel ranks (ZeRO-1). No effect with `optim.name=muon`,
    which needs whole matrices.
    """

    async_save: bool = False
    """Continue training while a checkpoint is written from a copy in host memory. The checkpoint counts as saved once
    all its files are on disk.
    """

    bf16: bool = True
    """Weights and activations in bfloat16. false: float32; then `train.dtype` must be float32 as well."""

    # Multi-token prediction.
    enable_mtp_training: bool = False
    """Train the layers of `megatron.mtp_num_layers` to predict further response tokens: their mean loss is added with
    the factor `megatron.mtp_loss_scaling_factor`. It reaches these layers only, not the rest of the model. false: their
    weights stay as they are.
    """

    # Sequence lengths and rotary embedding.
    seq_length: Annotated[int, Field(gt=0)] = 4096
    """Length of every packed micro-batch with `megatron.variable_seq_lengths=false`, in tokens over all
    context-parallel ranks. No effect otherwise.
    """

    max_position_embeddings: Annotated[int | None, Field(gt=0)] = None
    """Number of positions of the rotary embedding, in tokens: the value of `config.json`, or the original length of
    YaRN. None: the value of `config.json`.
    """

    rope_type: RopeType = RopeType.rope
    """Type of rotary embedding: plain or YaRN. A value set explicitly must match `config.json`; otherwise it is read
    from there.
    """

    variable_seq_lengths: bool = True
    """Allow micro-batches of a step to differ in length. false: packed micro-batches are padded to
    `megatron.seq_length`.
    """

    # User code.
    init_hook_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, called on each rank after Megatron-core is initialised. None: no
    function.
    """

    before_log_prob_hook_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, called before each forward pass without gradient. None: no function."""

    before_train_step_hook_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, called before each optimiser step. None: no function."""

    core_args: dict[str, Any] = field(default_factory=dict)
    """Further Megatron-core config fields by name. Set them as `megatron.<name>`."""
