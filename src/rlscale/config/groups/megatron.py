"""Group `megatron`: the Megatron-core backend."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


class RecomputeGranularity(StrEnum):
    """What is computed again in the backward pass."""

    full = "full"
    selective = "selective"


class RopeType(StrEnum):
    """Variants of rotary positions."""

    rope = "rope"
    yarn = "yarn"


@dataclass(kw_only=True)
class MegatronConfig(ConfigGroup):
    """Megatron-core; any field of its TransformerConfig or OptimizerConfig is a key too.

    Ignored with another `train.backend`.
    """

    passthrough_field = "core_args"

    tensor_model_parallel_size: Annotated[
        int, Field(gt=0, description="Ranks that share every layer's matrices (tensor parallelism).")
    ] = 1
    pipeline_model_parallel_size: Annotated[
        int, Field(gt=0, description="Stages of consecutive layers (pipeline parallelism).")
    ] = 1
    context_parallel_size: Annotated[
        int,
        Field(
            gt=0,
            description="Ranks that share a sequence; a packed micro-batch then holds "
            "`batch.max_tokens_per_gpu` times this many tokens.",
        ),
    ] = 1
    expert_model_parallel_size: Annotated[int, Field(gt=0, description="Ranks over which experts are spread.")] = 1
    recompute_granularity: Annotated[
        RecomputeGranularity | None,
        Field(
            description="`full`: recompute whole layers in the backward pass. `selective`: only attention's core. "
            "None: keep all activations."
        ),
    ] = None
    use_distributed_optimizer: Annotated[
        bool, Field(description="Spread master weights and optimiser state over the data-parallel ranks (ZeRO-1).")
    ] = True
    async_save: Annotated[
        bool,
        Field(
            description="Train on while a checkpoint is written, from a copy in the host's memory. It counts as a "
            "checkpoint once all of it is on disk."
        ),
    ] = False
    bf16: Annotated[
        bool,
        Field(description="Weights and activations in bfloat16; false: in float32, as `train.dtype` must say too."),
    ] = True
    seq_length: Annotated[
        int,
        Field(
            gt=0,
            description="Length of every packed micro-batch with `megatron.variable_seq_lengths=false`, in tokens of "
            "all context-parallel ranks together. Where lengths vary, it limits nothing.",
        ),
    ] = 4096
    max_position_embeddings: Annotated[
        int | None,
        Field(
            gt=0,
            description="Positions of the rotary embedding, in tokens, as the model's config.json says, or those that "
            "YaRN started from. None: from there.",
        ),
    ] = None
    rope_type: Annotated[
        RopeType,
        Field(
            description="Rotary positions, plain or stretched by YaRN. Given, it must be what the model's config.json "
            "says; else it is taken from there."
        ),
    ] = RopeType.rope
    variable_seq_lengths: Annotated[
        bool,
        Field(
            description="Micro-batches of a step may differ in length; false fills packed ones up to "
            "`megatron.seq_length`."
        ),
    ] = True
    init_hook_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, called on each rank once Megatron is initialised. "
            "None: none.",
        ),
    ] = None
    before_log_prob_hook_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, called before each forward pass without gradient. "
            "None: none.",
        ),
    ] = None
    before_train_step_hook_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, called before each optimiser step. None: none.",
        ),
    ] = None
    core_args: Annotated[
        dict[str, Any],
        Field(description="Further fields of Megatron-core's configs by name; set as `megatron.<name>`."),
    ] = field(default_factory=dict)
