"""Rules about `rollout.weight_precision`."""

from __future__ import annotations

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import read_hf_fields
from rlscale.architectures.low_precision import FP8_BLOCK, INT4_GROUP
from rlscale.config.groups.cluster import Device
from rlscale.config.groups.rollout import EngineKind, WeightPrecision
from rlscale.config.problems import show
from rlscale.config.rules.conditions import resolve_decoupled_loss, uses_engines, uses_external_engines
from rlscale.config.rules.each_group import for_each_group
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

KEY = "rollout.weight_precision"

_FAKE_QUANTIZATION = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
"""Variable by which slime's patched Megatron-core rounds the weights of experts to INT4 in the forward pass."""

_REMOVE = "remove it"
_OTHER_LAYOUTS = ("ep_size", "dp_size", "attn_dp_size", "enable_dp_attention", "moe_dense_tp_size", "moe_a2a_backend")
"""Arguments of SGLang with which the ranks of an engine do not divide the rows of every layer. A backend that sends
tokens to experts gives each rank whole experts."""


@rule
@for_each_group
def engine_reads_low_precision(config: RunConfig) -> list[Problem]:
    """SGLang repacks INT4 weights for its kernels when it loads them, and has FP8 layers for GPUs and CPUs with AMX.

    It loads experts of gpt-oss without the scales of FP8 blocks (`models/gpt_oss.py`, `_load_normal_weights`).
    """
    precision, engine = config.rollout.weight_precision, config.rollout.engine
    is_external = uses_external_engines(config)
    if precision is None or not uses_engines(config) or not (is_external or engine == EngineKind.sglang):
        return []
    if precision == WeightPrecision.int4:
        rule = f"be fp8 or null with rollout.engine={engine}: SGLang 0.5.23 repacks int4 weights when it starts, so a "
        return [_problem(precision, f"{rule}weight sync cannot replace them", "set it to fp8")]
    family = find_family(architecture_field(config.model, "model_type"))
    if family.sinks:
        rule = f"be null with rollout.engine={engine} and model.model_type={family.name}: SGLang 0.5.23 does not load "
        return [_problem(precision, f"{rule}scales of its experts in fp8 blocks", _REMOVE)]
    if is_external:
        return []
    if config.cluster.device == Device.cpu:
        fix = "choose rollout=embedded; SGLang's FP8 layers need a GPU, or kernels for AMX that are not installed"
        return [_problem(precision, "be null with rollout.engine=sglang and cluster.device=cpu", fix)]
    if config.debug.rollout_only:
        fix = "choose rollout=embedded, or remove it; SGLang gets such weights from a trainer alone"
        return [_problem(precision, "be null with rollout.engine=sglang and debug.rollout_only", fix)]
    return _sglang_problems(config, precision)


def _sglang_problems(config: RunConfig, precision: WeightPrecision) -> list[Problem]:
    given = config.sglang.server_args
    if given.get("speculative_draft_model_path") is not None:
        rule = "be null with sglang.speculative_draft_model_path: SGLang 0.5.23 expects it in fp8, too"
        return [_problem(precision, rule, _REMOVE)]
    if any(given.get(name) not in (None, False, "none") for name in _OTHER_LAYOUTS):
        return []  # SGLang itself refuses widths that do not fit
    ranks = config.cluster.rollout_num_gpus_per_engine // int(given.get("pp_size") or 1)
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = architecture_field(config.model, name)
        if width is not None and width % (ranks * FP8_BLOCK):
            rule = f"be null where model.{name}={width} is no multiple of {ranks * FP8_BLOCK}: blocks of {FP8_BLOCK} "
            rule += f"rows on each of {ranks} ranks of an SGLang engine"
            return [_problem(precision, rule, _REMOVE)]
    return []


@rule
def int4_groups_divide_the_inputs(config: RunConfig) -> list[Problem]:
    """Every input width of a quantised layer is a multiple of the group size."""
    precision = config.rollout.weight_precision
    if precision != WeightPrecision.int4 or not uses_engines(config):
        return []
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    widths = {f"model.{name}": architecture_field(config.model, name) for name in names}
    widths |= _widths_of_config_json(config)
    for name, width in widths.items():
        if width is not None and width % INT4_GROUP:
            rule = f"be fp8 or null where {name}={width} is no multiple of {INT4_GROUP}, the size of a group"
            return [_problem(precision, rule, "set it to fp8")]
    return []


def _widths_of_config_json(config: RunConfig) -> dict[str, int | None]:
    """Input widths that no key sets: of a shared expert with a gate, and of the output of linear attention."""
    if config.model.build is not None:
        return {}
    fields = read_hf_fields(config.model.hf_checkpoint)
    found = {"config.json's shared_expert_intermediate_size": fields.get("gated_shared_size")}
    if "linear_value_heads" in fields:
        values = fields["linear_value_heads"] * fields["linear_value_width"]
        found["config.json's linear_num_value_heads * linear_value_head_dim"] = values
    return found


@rule
def true_on_policy_mode_excludes_low_precision(config: RunConfig) -> list[Problem]:
    """The trainer computes with the weights that it trains, the engine with their quantised values."""
    precision = config.rollout.weight_precision
    if precision is None or not config.train.true_on_policy_mode:
        return []
    return [_problem(precision, "be null with train.true_on_policy_mode", _REMOVE)]


@rule
def weights_are_not_trained_in_int4(config: RunConfig) -> list[Problem]:
    """Megatron-core ignores the variable with which slime trains experts in INT4."""
    value = config.train.env_vars.get(_FAKE_QUANTIZATION, "0")
    if value in ("0", ""):
        return []
    path, rule = f"train.env_vars.{_FAKE_QUANTIZATION}", "be unset: training with INT4 weights is not supported"
    fix = "remove it; only a patch of Megatron-core in slime reads it, and rollout.weight_precision=int4 quantises the "
    return [Problem(path=path, rule=rule, value=show(value), fix=f"{fix}weights of the engines alone")]


def warn_low_precision(config: RunConfig) -> list[str]:
    """A warning about tokens of quantised weights that the loss takes for those of the policy."""
    precision, algo = config.rollout.weight_precision, config.algo
    is_corrected = algo.use_tis or algo.use_rollout_logprobs or resolve_decoupled_loss(config)[0]
    if precision is None or is_corrected or config.debug.rollout_only or not uses_engines(config):
        return []
    return [
        f"{KEY}={precision}: the engine samples from the quantised weights, another policy than is trained, and "
        "nothing corrects the difference (logprob_diff/*); set algo.use_tis=true"
    ]


def _problem(precision: WeightPrecision, rule: str, fix: str) -> Problem:
    return Problem(path=KEY, rule=rule, value=show(precision), fix=fix)


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=(KEY,),
        when=lambda config: not uses_engines(config) or config.rollout.engine == EngineKind.scripted,
        why="the run has no engine with weights",
    ),
)
