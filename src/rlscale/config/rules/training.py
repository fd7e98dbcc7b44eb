"""Rules about trained parameters, reference and teacher models, and training kernels."""

from __future__ import annotations

import re

from rlscale.architectures.family import find_family
from rlscale.config.groups.algo import compares_policies, uses_reference, uses_teacher
from rlscale.config.groups.cluster import Device
from rlscale.config.groups.fsdp import FLASH_ATTENTION, AttnImplementation
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import ComputeDtype, LoraSync, QkvFormat, TrainBackendName
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    is_sft,
    keeps_old_policies,
    offloads_engines,
    reads_buffer,
    shares_base,
    uses_engines,
    uses_external_engines,
    uses_megatron,
)
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def reference_has_a_source(config: RunConfig) -> list[Problem]:
    """The source is `model.ref_load`, else `checkpoint.load`, `model.hf_checkpoint` or `model.build`."""
    model = config.model
    sources = (model.ref_load, config.checkpoint.load, model.hf_checkpoint, model.build)
    if not uses_reference(config.algo) or any(source is not None for source in sources):
        return []
    cause = "algo.use_kl_loss" if config.algo.use_kl_loss else f"algo.kl_coef={config.algo.kl_coef:g}"
    fix = "set it, or model.hf_checkpoint, to a Hugging Face folder"
    return [Problem(path="model.ref_load", rule=f"be set with {cause}", value="null", fix=fix)]


@rule
def reference_step_has_a_folder(config: RunConfig) -> list[Problem]:
    step = config.model.ref_ckpt_step
    if step is None or not uses_reference(config.algo) or config.model.ref_load is not None:
        return []
    rule, fix = "be null without model.ref_load", "set model.ref_load to the folder with these checkpoints"
    return [Problem(path="model.ref_ckpt_step", rule=rule, value=show(step), fix=fix)]


@rule
def one_parameter_filter(config: RunConfig) -> list[Problem]:
    only, frozen = config.train.only_train_params, config.train.freeze_params
    if only is None or frozen is None:
        return []
    rule, fix = "be null with train.only_train_params", "keep one of them"
    return [Problem(path="train.freeze_params", rule=rule, value=show(frozen), fix=fix)]


@rule
def parameter_patterns_are_valid(config: RunConfig) -> list[Problem]:
    problems = []
    for name in ("only_train_params", "freeze_params"):
        for pattern in getattr(config.train, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                fix = f"correct the expression: {error}"
                problem = Problem(path=f"train.{name}", rule="contain regular expressions", value=pattern, fix=fix)
                problems.append(problem)
    return problems


@rule
def old_policy_is_kept_in_host_memory(config: RunConfig) -> list[Problem]:
    if not config.train.keep_old_actor or config.train.weights_backuper:
        return []
    rule, fix = "be true with train.keep_old_actor", "remove it; the old weights are kept in host memory"
    return [Problem(path="train.weights_backuper", rule=rule, value="false", fix=fix)]


@rule
def old_logprobs_have_one_source(config: RunConfig) -> list[Problem]:
    """`train.keep_old_actor` computes old logprobs with the weights that generated each token, other options do not."""
    algo = config.algo
    if not config.train.keep_old_actor or not compares_policies(algo):
        return []
    fixes = {
        "use_rollout_logprobs": "keep one of them; logprobs of the engine do not need old weights",
        "decoupled_loss": "keep one of them; algo.decoupled_loss uses the weights at the start of training instead",
    }
    return [
        Problem(path=f"algo.{name}", rule="be false with train.keep_old_actor", value="true", fix=fix)
        for name, fix in fixes.items()
        if getattr(algo, name)
    ]


@rule
def distillation_has_a_teacher(config: RunConfig) -> list[Problem]:
    model = config.model
    if not uses_teacher(config.algo) or any((model.teacher_load, model.teacher_url, config.data.teacher_by_source)):
        return []
    rule = f"be set with algo.opd_kl_coef={config.algo.opd_kl_coef:g}"
    fix = "set it to the Hugging Face folder of the teacher, or model.teacher_url to its server"
    return [Problem(path="model.teacher_load", rule=rule, value="null", fix=fix)]


ROUTING_REPLAY = ("algo.use_rollout_routing_replay", "algo.use_routing_replay")
"""Keys that replay expert routes of an earlier pass in training."""


def _active_replays(config: RunConfig) -> list[str]:
    """Keys of `ROUTING_REPLAY` that are true."""
    return [path for path in ROUTING_REPLAY if getattr(config.algo, path.removeprefix("algo."))]


@rule
def routing_replay_needs_experts(config: RunConfig) -> list[Problem]:
    """A model with known layers and without a number of experts is dense."""
    if config.model.num_experts is not None or config.model.num_layers is None:
        return []
    rule, fix = "be false for a model without experts", "remove it"
    return [Problem(path=path, rule=rule, value="true", fix=fix) for path in _active_replays(config)]


@rule
def one_routing_replay(config: RunConfig) -> list[Problem]:
    """The routes of the engine are also used for the old logprobs, which then have no routes to replay."""
    if len(_active_replays(config)) < 2:
        return []
    rule, fix = f"be false with {ROUTING_REPLAY[0]}", "keep one of them"
    return [Problem(path=ROUTING_REPLAY[1], rule=rule, value="true", fix=fix)]


@rule
def routing_replay_is_supported(config: RunConfig) -> list[Problem]:
    """Megatron-core replays routes of packed samples, without a fused router.

    Routes of earlier weight versions come from the engine only.
    """
    keys = _active_replays(config)
    if not keys:
        return []
    rule = f"be {{}} with {keys[0]}"
    # The engine records the routes of the version that generated, so its routes are allowed.
    kept = config.train.keep_old_actor and not config.algo.use_rollout_routing_replay
    fused = uses_megatron(config) and bool(config.megatron.core_args.get("moe_router_fusion"))
    padded = uses_megatron(config) and config.train.qkv_format != QkvFormat.thd
    wrong = {
        "train.qkv_format": ("thd", padded, "remove it"),
        "train.keep_old_actor": ("false", kept, "keep one of them; older weight versions selected other routes"),
        "megatron.moe_router_fusion": ("false", fused, "remove it; routes of the fused router cannot be replaced"),
    }
    # All other keys in `wrong` are booleans that are true.
    values = {"train.qkv_format": config.train.qkv_format}
    return [
        Problem(path=path, rule=rule.format(right), value=show(values.get(path, True)), fix=fix)
        for path, (right, is_wrong, fix) in wrong.items()
        if is_wrong
    ]


@rule
def true_on_policy_mode_is_supported(config: RunConfig) -> list[Problem]:
    """Trainer and engine compute equal bits only with equal weights and batch-invariant kernels."""
    if not config.train.true_on_policy_mode:
        return []
    problems = []

    def add(path: str, rule: str, value: str, fix: str) -> None:
        problems.append(Problem(path=path, rule=f"{rule} with train.true_on_policy_mode", value=value, fix=fix))

    rollout = config.rollout
    family = architecture_field(config.model, "model_type")
    # An unknown family is checked when the trainer loads the model.
    has_plain_layers = family is None or (
        find_family(family).plain_layers and not architecture_field(config.model, "num_experts")
    )
    if not has_plain_layers:
        rule = f"be false with model.model_type={family}"
        fix = "set it to false; the trainer has the engine's kernels for dense models with the layers of Llama only"
        problems.append(Problem(path="train.true_on_policy_mode", rule=rule, value="true", fix=fix))
    if config.train.backend != TrainBackendName.fsdp:
        fix = "choose train=fsdp; Megatron-core merges projections, which rounds differently"
        add("train.backend", "be fsdp", str(config.train.backend), fix)
    if rollout.max_staleness:
        add("rollout.max_staleness", "be 0", show(rollout.max_staleness), "set it to 0; older weights change logprobs")
    if rollout.engine == EngineKind.embedded and not rollout.deterministic:
        add("rollout.deterministic", "be true", "false", "remove it")
    if has_plain_layers and (rollout.engine == EngineKind.sglang or uses_external_engines(config)):
        engine = EngineKind.external if uses_external_engines(config) else rollout.engine
        fix = "choose rollout=embedded; only its kernels can run in the trainer"
        if family is not None and not find_family(family).embedded:
            fix = f"set train.true_on_policy_mode=false; the embedded engine does not support model.model_type={family}"
        add("rollout.engine", "be embedded", str(engine), fix)
    if config.train.backend == TrainBackendName.fsdp and config.fsdp.context_parallel_size > 1:
        size = show(config.fsdp.context_parallel_size)
        add("fsdp.context_parallel_size", "be 1", size, "remove it; engines do not split sequences over ranks")
    return problems


@rule
def lora_rank_is_below_the_width(config: RunConfig) -> list[Problem]:
    """Adapters of a rank above the width of the model have more parameters than the matrix that they change."""
    rank = config.train.lora.rank
    width = architecture_field(config.model, "hidden_size") if rank else None
    if width is None or rank <= width:
        return []
    rule = f"be <= model.hidden_size={width}"
    fix = f"choose a rank of 1 to {min(128, width)}; train.lora.rank=0 trains all weights"
    return [Problem(path="train.lora.rank", rule=rule, value=show(rank), fix=fix)]


@rule
def lora_is_supported(config: RunConfig) -> list[Problem]:
    """LoRA trains only adapters, so options that select, copy or reproduce whole weights are excluded."""
    train = config.train
    if not train.lora.rank:
        return []
    problems = []
    for name in ("only_train_params", "freeze_params"):
        if getattr(train, name) is not None:
            fix = "use train.lora.target_modules to select the layers"
            problems.append((f"train.{name}", "be null", show(getattr(train, name)), fix))
    for name in ("true_on_policy_mode", "keep_old_actor"):
        if getattr(train, name):
            problems.append((f"train.{name}", "be false", "true", "keep one of them"))
    interval = config.algo.ref_update_interval
    if interval is not None:
        problems.append(
            ("algo.ref_update_interval", "be null", show(interval), "remove it; the reference has no adapters")
        )
    megatron = config.megatron
    if uses_megatron(config) and megatron.enable_mtp_training and megatron.core_args.get("mtp_num_layers"):
        fix = "remove it; these layers stay frozen, as all but the adapters"
        problems.append(("megatron.enable_mtp_training", "be false", "true", fix))
    return [
        Problem(path=path, rule=f"{rule} with train.lora.rank={train.lora.rank}", value=value, fix=fix)
        for path, rule, value, fix in problems
    ]


@rule
def adapters_can_be_sent_alone(config: RunConfig) -> list[Problem]:
    """Engines must keep the base of the adapters, and apply adapters by request."""
    lora = config.train.lora
    if not lora.rank or lora.sync != LoraSync.adapter or not uses_engines(config):
        return []
    path, fix = "train.lora.sync", "set train.lora.sync=merged"
    if lora.shared_base:
        fix += " and train.lora.shared_base=false"
    engine = EngineKind.external if uses_external_engines(config) else config.rollout.engine
    problems = []
    if engine == EngineKind.sglang and lora.shared_base:
        rule, own = f"be false with rollout.engine={engine}", "remove it, or set rollout.engine=embedded"
        problems.append(Problem(path="train.lora.shared_base", rule=rule, value="true", fix=own))
    elif engine not in (EngineKind.embedded, EngineKind.sglang):
        rule = f"be merged with rollout.engine={engine}"
        problems.append(Problem(path=path, rule=rule, value=lora.sync, fix=f"{fix}, or rollout.engine=embedded"))
    if offloads_engines(config):
        rule = "be merged where engines release their weights (cluster.offload_rollout)"
        problems.append(Problem(path=path, rule=rule, value=lora.sync, fix=f"{fix}, or cluster.offload_rollout=false"))
    return problems


@rule
def base_can_be_shared(config: RunConfig) -> list[Problem]:
    """Engines of several jobs hold the adapters of each; no job may change, pause or place them for itself."""
    if not shares_base(config):
        return []
    maximum = config.cluster.rollout_max_num_gpus
    wrong = (
        ("train.lora.sync", config.train.lora.sync != LoraSync.adapter, "be adapter", str(config.train.lora.sync)),
        ("cluster.colocate", config.cluster.colocate, "be false", "true"),
        ("router.enabled", config.router.enabled, "be false", "true"),
        ("cluster.rollout_max_num_gpus", maximum is not None, "be null", show(maximum)),
        ("buffer.url", reads_buffer(config), "be null", show(config.buffer.url)),
    )
    fixes = {"train.lora.sync": "set it to adapter, or train.lora.shared_base=false"}
    return [
        Problem(
            path=path,
            rule=f"{right} with train.lora.shared_base",
            value=value,
            fix=fixes.get(path, "change it, or set train.lora.shared_base=false"),
        )
        for path, is_wrong, right, value in wrong
        if is_wrong
    ]


@rule
def environment_variable_names_are_valid(config: RunConfig) -> list[Problem]:
    wrong = [name for name in config.train.env_vars if not re.fullmatch(r"[A-Za-z_]\w*", name)]
    rule, fix = "contain names of environment variables", "use letters, digits and _"
    return [Problem(path="train.env_vars", rule=rule, value=show(name), fix=fix) for name in wrong]


@rule
def attention_kernel_supports_sinks(config: RunConfig) -> list[Problem]:
    """With sinks (gpt-oss) only one kernel keeps samples apart: transformers' model gives its mask no positions."""
    family, fsdp = architecture_field(config.model, "model_type"), config.fsdp
    is_padded, kernel = config.train.qkv_format == QkvFormat.bshd, fsdp.attn_implementation
    needed = AttnImplementation.eager if is_padded else AttnImplementation.sdpa
    # Where flash attention has no kernel, the resolve step replaces it by sdpa.
    is_replaced = not is_padded and kernel in FLASH_ATTENTION and not _has_flash_attention(config)
    size = fsdp.context_parallel_size
    if uses_megatron(config) or family is None or not find_family(family).sinks:
        return []
    problems = []
    if kernel != needed and not is_replaced:
        rule = f"be {needed} with model.model_type={family} and train.qkv_format={config.train.qkv_format}"
        path, fix = "fsdp.attn_implementation", f"set it to {needed}"
        problems.append(Problem(path=path, rule=rule, value=show(kernel), fix=fix))
    if size > 1:
        path, rule = "fsdp.context_parallel_size", f"be 1 with model.model_type={family}"
        fix = "remove it; attention over several ranks has no sinks"
        problems.append(Problem(path=path, rule=rule, value=show(size), fix=fix))
    return problems


def _has_flash_attention(config: RunConfig) -> bool:
    """Whether FSDP surely computes flash attention: not without CUDA, in float32, or with context parallelism."""
    has_kernel = config.cluster.device == Device.cuda and config.train.dtype != ComputeDtype.float32
    is_chosen = config.fsdp.attn_implementation in FLASH_ATTENTION
    return is_chosen and has_kernel and config.fsdp.context_parallel_size == 1


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("train.share_prompts",),
        when=uses_megatron,
        why="train.backend=megatron computes every sample separately",
    ),
    IgnoredKey(
        names=("train.recompute_loss_function",),
        when=uses_megatron,
        why="train.backend=megatron keeps the activations of the loss",
    ),
    IgnoredKey(
        names=("train.share_prompts",),
        when=_has_flash_attention,
        why="flash attention (fsdp.attn_implementation) computes every sample separately",
    ),
    IgnoredKey(
        names=("train.share_prompts",),
        when=lambda config: config.fsdp.attn_implementation == AttnImplementation.eager,
        why="fsdp.attn_implementation=eager computes every sample separately",
    ),
    IgnoredKey(
        names=("train.share_prompts",),
        when=lambda config: config.train.qkv_format == QkvFormat.bshd,
        why="train.qkv_format=bshd puts every sample into a separate row",
    ),
    IgnoredKey(
        names=("fsdp",),
        when=lambda config: config.train.backend != TrainBackendName.fsdp,
        why="train.backend is not fsdp",
    ),
    IgnoredKey(
        names=("train.reuse_logprobs",),
        when=lambda config: not compares_policies(config.algo),
        why="no advantages are computed, so no policies are compared",
    ),
    IgnoredKey(
        names=("fsdp.attn_implementation",),
        when=lambda config: config.fsdp.context_parallel_size > 1,
        why="fsdp.context_parallel_size has its own attention",
    ),
    IgnoredKey(
        names=("train.keep_old_actor",),
        when=lambda config: not compares_policies(config.algo),
        why="algo.loss_type does not use old logprobs",
    ),
    IgnoredKey(
        names=("train.keep_old_actor",),
        when=lambda config: config.rollout.max_staleness == 0,
        why="rollout.max_staleness is 0, so the current weights generate every token",
    ),
    IgnoredKey(
        names=(
            "train.lora.alpha",
            "train.lora.load",
            "train.lora.target_modules",
            "train.lora.sync",
            "train.lora.shared_base",
        ),
        when=lambda config: config.train.lora.rank == 0,
        why="train.lora.rank is 0, so there are no adapters",
    ),
    IgnoredKey(
        names=("train.lora.sync", "train.lora.shared_base"),
        when=lambda config: not uses_engines(config),
        why="there are no engines",
    ),
    IgnoredKey(
        names=("train.lora.shared_base",),
        when=lambda config: config.debug.rollout_only,
        why="debug.rollout_only trains no adapters",
    ),
    IgnoredKey(
        names=("train.weight_channel", "train.weight_folder", "train.update_weight_buffer_size"),
        when=shares_base,
        why="train.lora.shared_base sends adapters alone, over HTTP",
    ),
    IgnoredKey(
        names=("train.log_probs_chunk_size", "train.share_prompts", "fsdp.attn_implementation"),
        when=lambda config: config.train.true_on_policy_mode,
        why="train.true_on_policy_mode uses the kernels of the engine",
    ),
    IgnoredKey(
        names=("train.true_on_policy_mode",),
        when=is_sft,
        why="algo.loss_type is sft_loss, so no engine generates the samples",
    ),
    IgnoredKey(
        names=("train.reuse_logprobs",),
        when=keeps_old_policies,
        why="train.keep_old_actor provides the old logprobs",
    ),
)
