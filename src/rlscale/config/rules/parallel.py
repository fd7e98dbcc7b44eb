"""Rules about the sizes by which trainers and engines are divided: data, tensor, pipeline, context, experts."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from rlscale.config.errors import show
from rlscale.config.groups.fsdp import AttnImplementation
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import QkvFormat, TrainBackendName
from rlscale.config.rules.rule import PARALLEL, num_trainer_ranks, ranks_per_model, rule, samples_per_step
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

STEP = (
    "batch.rollout_batch_size",
    "batch.n_samples_per_prompt",
    "batch.global_batch_size",
    "batch.num_steps_per_rollout",
)
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of Megatron-core by which stages may differ in layers."""


@rule(*PARALLEL)
def parallel_sizes_divide_the_trainer(config: RunConfig) -> list[Problem]:
    """Ranks that hold one copy of the model together divide the ranks of the trainer."""
    ranks, each = num_trainer_ranks(config), ranks_per_model(config)
    if ranks % each == 0:
        return []
    cluster = config.cluster
    of = f"the trainer's {cluster.actor_num_nodes} * {cluster.actor_num_gpus_per_node} = {ranks} ranks"
    if config.train.backend == TrainBackendName.fsdp:
        path, fix = "fsdp.context_parallel_size", f"set it to {_nearest_divisor(ranks, each)}"
        return [Problem(path=path, rule=f"divide {of}", value=show(each), fix=fix)]
    megatron = config.megatron
    sizes = {
        "tensor": megatron.tensor_model_parallel_size,
        "pipeline": megatron.pipeline_model_parallel_size,
        "context": megatron.context_parallel_size,
    }
    product = " * ".join(f"{name} {size}" for name, size in sizes.items())
    fix = f"lower one of the three, or use a multiple of {each} GPUs"
    first, *others = sorted(sizes, key=lambda name: sizes[name] == 1)  # a size that divides, before those of 1
    rule = f"divide {of}, together with {others[0]} and {others[1]}"
    path = f"megatron.{first}_parallel_size" if first == "context" else f"megatron.{first}_model_parallel_size"
    return [Problem(path=path, rule=rule, value=f"{product} = {each}", fix=fix)]


@rule("train.backend", "fsdp.context_parallel_size", "fsdp.attn_implementation")
def shared_samples_have_their_attention(config: RunConfig) -> list[Problem]:
    """Ranks that share a sample attend by a function of rlscale, on any device."""
    fsdp = config.fsdp
    is_alone = config.train.backend != TrainBackendName.fsdp or fsdp.context_parallel_size == 1
    if is_alone or fsdp.attn_implementation != AttnImplementation.eager:
        return []
    rule, fix = f"not be eager with fsdp.context_parallel_size={fsdp.context_parallel_size}", "leave it out"
    return [Problem(path="fsdp.attn_implementation", rule=rule, value="eager", fix=fix)]


@rule(*STEP, *PARALLEL)
def batch_divides_among_ranks(config: RunConfig) -> list[Problem]:
    """Every data-parallel rank takes the same number of samples of a step."""
    ranks, each, size = num_trainer_ranks(config), ranks_per_model(config), samples_per_step(config)
    if ranks % each or size < ranks // each or size % (ranks // each) == 0:
        return []  # other rules speak of the first two
    parts = ranks // each
    cluster = config.cluster
    product = f"cluster.actor_num_nodes={cluster.actor_num_nodes} * "
    product += f"cluster.actor_num_gpus_per_node={cluster.actor_num_gpus_per_node}"
    product += f" / {each} of a model = {parts}" if each > 1 else f" = {parts}"
    near = [number for number in (size // parts * parts, size // parts * parts + parts) if number]
    sizes = " or ".join(f"batch.global_batch_size={number}" for number in near)
    fix = f"nearest are {sizes}, or {_nearest_divisor(size, parts)} data-parallel ranks"
    rule = f"be a multiple of the number of data-parallel ranks, {product}"
    return [Problem(path="batch.global_batch_size", rule=rule, value=show(size), fix=fix)]


@rule("batch.use_dynamic_batch_size", "batch.micro_batch_size", *STEP, *PARALLEL)
def micro_batches_fill_the_pipeline(config: RunConfig) -> list[Problem]:
    """Megatron-core runs whole micro-batches of one size, as many on every rank."""
    batch, is_megatron = config.batch, config.train.backend == TrainBackendName.megatron
    ranks, each, size = num_trainer_ranks(config), ranks_per_model(config), samples_per_step(config)
    parts = max(ranks // each, 1)
    if not is_megatron or batch.use_dynamic_batch_size or size % parts or (size // parts) % batch.micro_batch_size == 0:
        return []
    share = size // parts
    fix = f"set it to {_nearest_divisor(share, batch.micro_batch_size)}"
    rule = f"divide the {share} samples that a rank has of a step"
    return [Problem(path="batch.micro_batch_size", rule=rule, value=show(batch.micro_batch_size), fix=fix)]


@rule("train.backend", "megatron.tensor_model_parallel_size", "model.num_attention_heads", "model.num_key_value_heads")
def tensor_parallel_divides_heads(config: RunConfig) -> list[Problem]:
    size = config.megatron.tensor_model_parallel_size
    if config.train.backend != TrainBackendName.megatron:
        return []
    return _divides_heads(config, "megatron.tensor_model_parallel_size", size)


@rule("train.backend", "megatron.pipeline_model_parallel_size", "megatron.core_args", "model.num_layers")
def pipeline_divides_layers(config: RunConfig) -> list[Problem]:
    size, layers = config.megatron.pipeline_model_parallel_size, config.model.num_layers
    uneven = any(config.megatron.core_args.get(name) for name in UNEVEN_STAGES)
    if config.train.backend != TrainBackendName.megatron or layers is None or uneven or layers % size == 0:
        return []
    fix = f"set it to {_nearest_divisor(layers, size)}, or let a stage differ: megatron.{UNEVEN_STAGES[1]}=<number>"
    rule = f"divide model.num_layers={layers}"
    return [Problem(path="megatron.pipeline_model_parallel_size", rule=rule, value=show(size), fix=fix)]


@rule("megatron.expert_model_parallel_size", "megatron.core_args", "model.num_experts", "model.num_layers", *PARALLEL)
def expert_parallel_divides(config: RunConfig) -> list[Problem]:
    """Experts are spread over ranks of one pipeline stage, the same number on each."""
    megatron, model = config.megatron, config.model
    size = megatron.expert_model_parallel_size
    if config.train.backend != TrainBackendName.megatron or size == 1:
        return []
    path, problems = "megatron.expert_model_parallel_size", []
    if model.num_experts is None and model.num_layers is not None:
        rule, fix = "be 1 with a model that has no experts", "leave it out"
        problems.append(Problem(path=path, rule=rule, value=show(size), fix=fix))
    if model.num_experts is not None and model.num_experts % size:
        fix = f"set it to {_nearest_divisor(model.num_experts, size)}"
        rule = f"divide model.num_experts={model.num_experts}"
        problems.append(Problem(path=path, rule=rule, value=show(size), fix=fix))
    stage, odd = divmod(num_trainer_ranks(config), megatron.pipeline_model_parallel_size)
    within = int(megatron.core_args.get("expert_tensor_parallel_size") or 1)
    if not odd and stage % (size * within):
        rule = f"divide the {stage} ranks of a pipeline stage"
        rule += f", times megatron.expert_tensor_parallel_size={within}" if within > 1 else ""
        problems.append(
            Problem(path=path, rule=rule, value=show(size), fix=f"set it to {_nearest_divisor(stage, size)}")
        )
    return problems


@rule(
    "train.qkv_format",
    "train.backend",
    "train.true_on_policy_mode",
    "fsdp.context_parallel_size",
    "batch.use_dynamic_batch_size",
    "batch.max_tokens_per_gpu",
)
def padded_layout_is_static(config: RunConfig) -> list[Problem]:
    """Padded micro-batches hold a number of samples, not of tokens, each sample whole and in a row of its own."""
    if config.train.qkv_format != QkvFormat.bshd:
        return []
    problems = []
    if config.batch.use_dynamic_batch_size:
        fix = "packing by tokens needs train.qkv_format=thd; set one of the two"
        rule = "be false with train.qkv_format=bshd"
        problems.append(Problem(path="batch.use_dynamic_batch_size", rule=rule, value="true", fix=fix))
    packs = {"train.true_on_policy_mode": config.train.true_on_policy_mode}
    if config.train.backend == TrainBackendName.fsdp:
        packs["fsdp.context_parallel_size"] = config.fsdp.context_parallel_size > 1
    for path in (path for path, is_on in packs.items() if is_on):
        value = show(attrgetter(path)(config))
        problem = Problem(path="train.qkv_format", rule=f"be thd with {path}={value}", value="bshd", fix="leave it out")
        problems.append(problem)
    return problems


@rule(
    "train.backend",
    "model.num_experts",
    "megatron.core_args",
    "megatron.tensor_model_parallel_size",
    "megatron.expert_model_parallel_size",
)
def shared_layers_share_their_experts(config: RunConfig) -> list[Problem]:
    """Megatron-core 0.16 adds up wrong gradients of experts that every tensor-parallel rank has whole."""
    megatron = config.megatron
    tensor, path = megatron.tensor_model_parallel_size, "megatron.expert_tensor_parallel_size"
    within = megatron.core_args.get("expert_tensor_parallel_size") or tensor
    is_spread = megatron.expert_model_parallel_size > 1 or within > 1
    is_dense = config.model.num_experts is None
    if config.train.backend != TrainBackendName.megatron or is_dense or tensor == 1 or is_spread:
        return []
    rule = f"be {tensor} with megatron.tensor_model_parallel_size={tensor} and megatron.expert_model_parallel_size=1"
    return [Problem(path=path, rule=rule, value=show(within), fix="leave it out, or spread the experts over ranks")]


@rule("train.backend", "model.num_experts", "megatron.core_args", "megatron.tensor_model_parallel_size")
def shared_experts_share_sequences(config: RunConfig) -> list[Problem]:
    """Megatron-core trains experts on tensor-parallel ranks only where those share the tokens between layers, too."""
    megatron = config.megatron
    tensor, is_on = megatron.tensor_model_parallel_size, bool(megatron.core_args.get("sequence_parallel"))
    if config.train.backend != TrainBackendName.megatron or config.model.num_experts is None or tensor == 1 or is_on:
        return []
    rule = f"be true for a model with experts and megatron.tensor_model_parallel_size={tensor}"
    return [Problem(path="megatron.sequence_parallel", rule=rule, value="false", fix="set it to true")]


@rule("train.backend", "megatron.core_args")
def tokens_reach_experts_in_any_number(config: RunConfig) -> list[Problem]:
    """Micro-batches differ in length, for which one of Megatron-core's dispatchers is not made."""
    kind = config.megatron.core_args.get("moe_token_dispatcher_type")
    if config.train.backend != TrainBackendName.megatron or kind != "allgather":
        return []
    path, rule = "megatron.moe_token_dispatcher_type", "be alltoall or flex, as micro-batches differ in length"
    return [Problem(path=path, rule=rule, value=show(kind), fix="leave it out")]


WHOLE_WEIGHTS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")
"""Fields of Megatron-core that leave weights unfinished between steps, where others read them."""


@rule("train.backend", "megatron.core_args")
def steps_end_with_whole_weights(config: RunConfig) -> list[Problem]:
    if config.train.backend != TrainBackendName.megatron:
        return []
    rule, fix = "be false", "passes without gradient and the weight sync read the weights between steps; leave it out"
    return [
        Problem(path=f"megatron.{name}", rule=rule, value="true", fix=fix)
        for name in WHOLE_WEIGHTS
        if config.megatron.core_args.get(name)
    ]


@rule("train.backend", "megatron.core_args")
def offloaded_optimizer_has_a_share(config: RunConfig) -> list[Problem]:
    """Megatron-core's own default of the share is 0."""
    given, path = config.megatron.core_args, "megatron.optimizer_offload_fraction"
    share = given.get("optimizer_offload_fraction", 0.0)
    is_on = config.train.backend == TrainBackendName.megatron and given.get("optimizer_cpu_offload", False)
    if not is_on or 0 < share <= 1:
        return []
    rule = "be above 0 and at most 1 with megatron.optimizer_cpu_offload"
    fix = "set it to the share of the optimiser's states that the host keeps, e.g. 1.0"
    return [Problem(path=path, rule=rule, value=show(share), fix=fix)]


@rule(
    "train.backend",
    "train.qkv_format",
    "megatron.variable_seq_lengths",
    "megatron.seq_length",
    "megatron.context_parallel_size",
    "batch.use_dynamic_batch_size",
    "batch.max_tokens_per_gpu",
)
def one_length_holds_a_micro_batch(config: RunConfig) -> list[Problem]:
    """Packed micro-batches of one length, all of them of `megatron.seq_length`."""
    megatron, most = config.megatron, config.batch.max_tokens_per_gpu
    packs = config.batch.use_dynamic_batch_size and config.train.qkv_format == QkvFormat.thd
    if config.train.backend != TrainBackendName.megatron or megatron.variable_seq_lengths or not packs or most is None:
        return []
    needed = most * megatron.context_parallel_size
    if megatron.seq_length >= needed:
        return []
    rule = f"be at least {needed}, batch.max_tokens_per_gpu times megatron.context_parallel_size, with "
    rule += "megatron.variable_seq_lengths=false"
    return [Problem(path="megatron.seq_length", rule=rule, value=show(megatron.seq_length), fix=f"set it to {needed}")]


@rule("train.backend", "train.dtype", "megatron.bf16")
def megatron_computes_in_one_format(config: RunConfig) -> list[Problem]:
    """true, the default, follows `train.dtype`; false contradicts bfloat16."""
    if config.train.backend != TrainBackendName.megatron or config.megatron.bf16 or config.train.dtype != "bfloat16":
        return []
    rule, fix = "be true with train.dtype=bfloat16", "set train.dtype=float32 instead, which this follows"
    return [Problem(path="megatron.bf16", rule=rule, value="false", fix=fix)]


@rule("train.backend", "model.padded_vocab_size", "model.vocab_size", "megatron.tensor_model_parallel_size")
def padded_vocabulary_fits(config: RunConfig) -> list[Problem]:
    padded, size = config.model.padded_vocab_size, config.model.vocab_size
    if config.train.backend != TrainBackendName.megatron or padded is None:
        return []
    parts, path = config.megatron.tensor_model_parallel_size, "model.padded_vocab_size"
    problems = []
    if size is not None and padded < size:
        rule = f"be at least model.vocab_size={size}"
        problems.append(Problem(path=path, rule=rule, value=show(padded), fix="leave it out: it is derived"))
    if padded % parts:
        rule = f"be a multiple of megatron.tensor_model_parallel_size={parts}"
        fix = f"set it to {(padded // parts + 1) * parts}, or leave it out"
        problems.append(Problem(path=path, rule=rule, value=show(padded), fix=fix))
    return problems


@rule(
    "rollout.engine",
    "cluster.rollout_num_gpus_per_engine",
    "sglang.server_args",
    "model.num_attention_heads",
    "model.num_key_value_heads",
)
def engine_divides_heads(config: RunConfig) -> list[Problem]:
    """SGLang's tensor parallelism, the GPUs of an engine without its stages, divides the heads."""
    arguments, each = config.sglang.server_args, config.cluster.rollout_num_gpus_per_engine
    stages = _positive(arguments.get("pp_size"))
    if config.rollout.engine != EngineKind.sglang or each % stages or arguments.get("enable_dp_attention"):
        return []
    return _divides_heads(config, "cluster.rollout_num_gpus_per_engine", each // stages)


@rule("rollout.engine", "cluster.rollout_num_gpus_per_engine", "sglang.server_args", "model.num_experts")
def engine_parts_divide(config: RunConfig) -> list[Problem]:
    """SGLang's experts and its data-parallel attention are spread over ranks of tensor parallelism."""
    arguments, each = config.sglang.server_args, config.cluster.rollout_num_gpus_per_engine
    stages = _positive(arguments.get("pp_size"))
    if config.rollout.engine != EngineKind.sglang or each % stages:
        return []
    problems = []
    for name in ("ep_size", "dp_size"):
        size = _positive(arguments.get(name))
        if (each // stages) % size:
            rule = f"divide the {each // stages} GPUs of an engine's stage"
            fix = f"set it to {_nearest_divisor(each // stages, size)}, or more cluster.rollout_num_gpus_per_engine"
            problems.append(Problem(path=f"sglang.{name}", rule=rule, value=show(size), fix=fix))
    experts, size = config.model.num_experts, _positive(arguments.get("ep_size"))
    if experts is not None and experts % size:
        rule, fix = f"divide model.num_experts={experts}", f"set it to {_nearest_divisor(experts, size)}"
        problems.append(Problem(path="sglang.ep_size", rule=rule, value=show(size), fix=fix))
    return problems


def _divides_heads(config: RunConfig, path: str, size: int) -> list[Problem]:
    """Ranks divide the heads; they divide the key/value heads too, or several ranks share each."""
    heads, kv_heads = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads is not None and heads % size:
        fix = f"set it to {_nearest_divisor(heads, size)}"
        return [Problem(path=path, rule=f"divide model.num_attention_heads={heads}", value=show(size), fix=fix)]
    if kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0:
        return []
    rule = f"divide model.num_key_value_heads={kv_heads}, or be a multiple of it"
    return [Problem(path=path, rule=rule, value=show(size), fix=f"set it to {_nearest_divisor(kv_heads, size)}")]


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _positive(value: Any) -> int:
    """A size of parallelism; what is none counts as 1, and its own rule speaks of it."""
    return value if isinstance(value, int) and value > 0 else 1
