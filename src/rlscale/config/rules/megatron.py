"""Rules about options of Megatron-core."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.config.groups.model import MegatronToHf
from rlscale.config.groups.optim import OptimizerName
from rlscale.config.groups.train import QkvFormat
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_megatron
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.parallel import nearest_divisor
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def experts_are_sharded_with_tensor_parallel(config: RunConfig) -> list[Problem]:
    """Megatron-core 0.16 sums wrong gradients for experts that are replicated on tensor-parallel ranks."""
    megatron = config.megatron
    tensor, path = megatron.tensor_model_parallel_size, "megatron.expert_tensor_parallel_size"
    # Megatron-core uses the tensor-parallel size where no expert size is set.
    within = megatron.core_args.get("expert_tensor_parallel_size") or tensor
    is_sharded = megatron.expert_model_parallel_size > 1 or within > 1
    is_dense = config.model.num_experts is None
    if not uses_megatron(config) or is_dense or tensor == 1 or is_sharded:
        return []
    rule = f"be {tensor} with megatron.tensor_model_parallel_size={tensor} and megatron.expert_model_parallel_size=1"
    fix = "remove it, or raise megatron.expert_model_parallel_size"
    return [Problem(path=path, rule=rule, value=show(within), fix=fix)]


@rule
def experts_need_sequence_parallel(config: RunConfig) -> list[Problem]:
    """With tensor parallelism, Megatron-core trains experts only with sequence parallelism."""
    megatron = config.megatron
    tensor, is_on = megatron.tensor_model_parallel_size, bool(megatron.core_args.get("sequence_parallel"))
    if not uses_megatron(config) or config.model.num_experts is None or tensor == 1 or is_on:
        return []
    rule = f"be true for a model with experts and megatron.tensor_model_parallel_size={tensor}"
    return [Problem(path="megatron.sequence_parallel", rule=rule, value="false", fix="set it to true")]


@rule
def ranks_divide_key_heads_with_wide_norms(config: RunConfig) -> list[Problem]:
    """A norm over all heads needs each key head on one tensor-parallel rank only."""
    family, heads = architecture_field(config.model, "model_type"), config.model.num_key_value_heads
    tensor = config.megatron.tensor_model_parallel_size
    if not uses_megatron(config) or heads is None or not find_family(family).wide_qk_norm or heads % tensor == 0:
        return []
    rule = f"divide model.num_key_value_heads={heads} with model.model_type={family}"
    path, fix = "megatron.tensor_model_parallel_size", f"set it to {nearest_divisor(heads, tensor)}"
    return [Problem(path=path, rule=rule, value=show(tensor), fix=fix)]


@rule
def adapters_fit_layers_of_megatron(config: RunConfig) -> list[Problem]:
    """Adapters are added to the layers of rlscale's own weight mapping, and each key head is on one rank."""
    lora, model = config.train.lora, config.model
    if not uses_megatron(config) or not lora.rank:
        return []
    problems = []
    if model.megatron_to_hf_mode == MegatronToHf.bridge:
        rule, fix = f"be raw with train.lora.rank={lora.rank}", "remove it; mbridge knows no adapters"
        problems.append(Problem(path="model.megatron_to_hf_mode", rule=rule, value="bridge", fix=fix))
    heads, tensor = architecture_field(model, "num_key_value_heads"), config.megatron.tensor_model_parallel_size
    is_fused = lora.target_modules is None or not {"q_proj", "k_proj", "v_proj"}.isdisjoint(lora.target_modules)
    is_latent = find_family(architecture_field(model, "model_type")).latent_attention
    if heads is not None and is_fused and not is_latent and heads % tensor:
        rule = f"divide model.num_key_value_heads={heads} with train.lora.rank={lora.rank}"
        fix = f"set it to {nearest_divisor(heads, tensor)}, or choose train=fsdp"
        path = "megatron.tensor_model_parallel_size"
        problems.append(Problem(path=path, rule=rule, value=show(tensor), fix=fix))
    return problems


@rule
def token_dispatcher_supports_variable_lengths(config: RunConfig) -> list[Problem]:
    """Micro-batches differ in length, which the allgather dispatcher of Megatron-core does not support."""
    kind = config.megatron.core_args.get("moe_token_dispatcher_type")
    if not uses_megatron(config) or kind != "allgather":
        return []
    path, rule, fix = (
        "megatron.moe_token_dispatcher_type",
        "be alltoall or flex",
        "remove it; micro-batches differ in length",
    )
    return [Problem(path=path, rule=rule, value=show(kind), fix=fix)]


@rule
def mtp_layers_share_the_last_stage(config: RunConfig) -> list[Problem]:
    """The last stage holds the layers for multi-token prediction, and for them a copy of the embedding."""
    megatron, path = config.megatron, "megatron.pipeline_model_parallel_size"
    num_stages = megatron.pipeline_model_parallel_size
    is_tied = num_stages > 1 and architecture_field(config.model, "tie_word_embeddings")
    if not uses_megatron(config) or not megatron.core_args.get("mtp_num_layers"):
        return []
    problems = []
    if is_tied:
        # Megatron-core 0.16 gives that stage an output layer next to the copy, and fails to save both.
        rule = "be 1 with megatron.mtp_num_layers and model.tie_word_embeddings=true"
        fix = "set it to 1, or remove megatron.mtp_num_layers"
        problems.append(Problem(path=path, rule=rule, value=show(num_stages), fix=fix))
    layout = megatron.core_args.get("pipeline_model_parallel_layout")
    if layout is not None:
        path, rule = "megatron.pipeline_model_parallel_layout", "be null with megatron.mtp_num_layers"
        problems.append(Problem(path=path, rule=rule, value=show(layout), fix="remove it"))
    factor = megatron.core_args.get("mtp_loss_scaling_factor")
    if factor is not None and factor < 0:
        fix = "set it to 0.1, or remove it"
        problems.append(
            Problem(path="megatron.mtp_loss_scaling_factor", rule="be at least 0", value=show(factor), fix=fix)
        )
    return problems


@rule
def partial_recomputation_needs_stages(config: RunConfig) -> list[Problem]:
    """Schedules of pipeline stages keep the activations of some micro-batches; the others recompute whole layers."""
    megatron, name = config.megatron, "num_microbatches_with_partial_activation_checkpoints"
    number, path = megatron.core_args.get(name), f"megatron.{name}"
    granularity, num_stages = megatron.recompute_granularity, megatron.pipeline_model_parallel_size
    if not uses_megatron(config) or number is None:
        return []
    if granularity != RecomputeGranularity.full:
        rule = f"be null with megatron.recompute_granularity={show(granularity)}"
        fix = "remove it, or set megatron.recompute_granularity=full"
        return [Problem(path=path, rule=rule, value=show(number), fix=fix)]
    if num_stages == 1:
        rule = "be null with megatron.pipeline_model_parallel_size=1: one micro-batch at a time has activations"
        return [Problem(path=path, rule=rule, value=show(number), fix="remove it")]
    return []


DELAYED_GATHER = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")
"""Fields of Megatron-core that gather the updated weights only in the next forward pass."""


@rule
def weights_are_complete_between_steps(config: RunConfig) -> list[Problem]:
    if not uses_megatron(config):
        return []
    fix = "remove it; the weight sync and passes without gradient read complete weights between steps"
    return [
        Problem(path=f"megatron.{name}", rule="be false", value="true", fix=fix)
        for name in DELAYED_GATHER
        if config.megatron.core_args.get(name)
    ]


@rule
def offloaded_optimizer_has_a_fraction(config: RunConfig) -> list[Problem]:
    """The fraction that is offloaded; 1 if it is not set."""
    given, path = config.megatron.core_args, "megatron.optimizer_offload_fraction"
    fraction = given.get("optimizer_offload_fraction")
    fraction = 1.0 if fraction is None else fraction
    is_on = uses_megatron(config) and given.get("optimizer_cpu_offload", False)
    if not is_on or 0 < fraction <= 1:
        return []
    rule = "be above 0 and at most 1 with megatron.optimizer_cpu_offload"
    fix = "set it to the fraction of the optimiser state to keep in host memory, e.g. 1.0"
    return [Problem(path=path, rule=rule, value=show(fraction), fix=fix)]


@rule
def fixed_seq_length_fits_a_micro_batch(config: RunConfig) -> list[Problem]:
    """With `megatron.variable_seq_lengths=false` every packed micro-batch has `megatron.seq_length` tokens."""
    megatron, limit = config.megatron, config.batch.max_tokens_per_gpu
    packs = config.batch.use_dynamic_batch_size and config.train.qkv_format == QkvFormat.thd
    if not uses_megatron(config) or megatron.variable_seq_lengths or not packs or limit is None:
        return []
    # Context-parallel ranks share a micro-batch, so its limit grows with them.
    needed = limit * megatron.context_parallel_size
    if megatron.seq_length >= needed:
        return []
    rule = f"be at least batch.max_tokens_per_gpu * megatron.context_parallel_size = {needed} with "
    rule += "megatron.variable_seq_lengths=false"
    return [Problem(path="megatron.seq_length", rule=rule, value=show(megatron.seq_length), fix=f"set it to {needed}")]


@rule
def megatron_dtype_matches(config: RunConfig) -> list[Problem]:
    """The default, true, follows `train.dtype`; false contradicts bfloat16."""
    if not uses_megatron(config) or config.megatron.bf16 or config.train.dtype != "bfloat16":
        return []
    rule, fix = "be true with train.dtype=bfloat16", "set train.dtype=float32 instead; megatron.bf16 follows it"
    return [Problem(path="megatron.bf16", rule=rule, value="false", fix=fix)]


@rule
def padded_vocabulary_fits(config: RunConfig) -> list[Problem]:
    padded, size = config.model.padded_vocab_size, config.model.vocab_size
    if not uses_megatron(config) or padded is None:
        return []
    parts, path = config.megatron.tensor_model_parallel_size, "model.padded_vocab_size"
    problems = []
    if size is not None and padded < size:
        rule, fix = f"be at least model.vocab_size={size}", "remove it to derive it"
        problems.append(Problem(path=path, rule=rule, value=show(padded), fix=fix))
    if padded % parts:
        rule = f"be a multiple of megatron.tensor_model_parallel_size={parts}"
        # The next multiple above the value.
        fix = f"set it to {(padded // parts + 1) * parts}, or remove it"
        problems.append(Problem(path=path, rule=rule, value=show(padded), fix=fix))
    return problems


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("megatron",),
        when=lambda config: not uses_megatron(config),
        why="train.backend is not megatron",
    ),
    IgnoredKey(
        names=("megatron.seq_length",),
        when=lambda config: config.megatron.variable_seq_lengths,
        why="megatron.variable_seq_lengths allows micro-batches of different lengths",
    ),
    IgnoredKey(
        names=("megatron.enable_mtp_training",),
        when=lambda config: not config.megatron.core_args.get("mtp_num_layers"),
        why="megatron.mtp_num_layers is not set",
    ),
    IgnoredKey(
        names=("megatron.use_distributed_optimizer",),
        when=lambda config: config.optim.name == OptimizerName.muon,
        why="optim.name is muon: each data-parallel rank needs whole matrices",
    ),
)
