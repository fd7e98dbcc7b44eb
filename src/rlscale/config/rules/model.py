"""Rules about the model and sequence lengths."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rlscale.architectures.family import find_family, names_with
from rlscale.architectures.hf_config import (
    CONFIG_NAMES,
    TINY_MODELS,
    architecture_fields,
    read_config_json,
    tiny_config_json,
)
from rlscale.architectures.megatron_fields import MegatronKeys, check_architecture, check_bridge, check_rope_type
from rlscale.config.groups.algo import uses_reference, uses_teacher
from rlscale.config.groups.megatron import MegatronConfig, RopeType
from rlscale.config.groups.model import MegatronToHf, ModelConfig
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.problems import show
from rlscale.config.rules.conditions import uses_engines, uses_megatron
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem, count_noun

_FROM_CHECKPOINT = "use the values of the checkpoint's config.json, or choose the matching model=<option>"


def architecture_field(model: ModelConfig, name: str) -> Any:
    """Value of an architecture key: as set, else of `model.build`, else of `config.json`; None where it is unknown."""
    # Only this key is read, so a wrong value of another one does not suppress the rule.
    given = {name: getattr(model, name)}
    return architecture_fields(given, build=model.build, hf_checkpoint=model.hf_checkpoint).get(name)


def megatron_keys(model: ModelConfig, megatron: MegatronConfig) -> MegatronKeys:
    """The keys of both groups that must agree with a `config.json`."""
    return MegatronKeys(
        family=model.name,
        fields={name: getattr(model, name) for name in CONFIG_NAMES},
        core_args=megatron.core_args,
        rope_type=megatron.rope_type,
        max_position_embeddings=megatron.max_position_embeddings,
        uses_bridge=model.megatron_to_hf_mode == MegatronToHf.bridge,
        uses_hf_config=model.use_hf_config_for_megatron,
    )


@rule
def model_has_one_source(config: RunConfig) -> list[Problem]:
    model = config.model
    if model.hf_checkpoint is None and model.build is None:
        fix = "set it, or choose model=tiny_qwen3 for a small model with random weights"
        return [Problem(path="model.hf_checkpoint", rule="be set with model.build=null", value="null", fix=fix)]
    if model.hf_checkpoint is not None and model.build is not None:
        rule = f"be null with model.build={model.build}"
        fix = "choose model=hf to use the checkpoint, or remove it"
        return [Problem(path="model.hf_checkpoint", rule=rule, value=model.hf_checkpoint, fix=fix)]
    return []


@rule
def kv_heads_divide_query_heads(config: RunConfig) -> list[Problem]:
    heads, kv_heads = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads is None or kv_heads is None or heads % kv_heads == 0:
        return []
    rule = f"divide model.num_attention_heads={heads}"
    return [Problem(path="model.num_key_value_heads", rule=rule, value=show(kv_heads), fix=_FROM_CHECKPOINT)]


@rule
def heads_divide_hidden_size(config: RunConfig) -> list[Problem]:
    """A tiny model without `model.head_dim` splits its width among the heads; rotary embedding pairs dimensions."""
    model = config.model
    fields = {} if model.build is None else TINY_MODELS[model.build]
    if not fields or "head_dim" in fields or "qk_rope_head_dim" in fields:
        return []
    hidden = model.hidden_size or int(fields["hidden_size"])
    heads = model.num_attention_heads or int(fields["num_attention_heads"])
    if hidden % (2 * heads) == 0:
        return []
    rule = f"be a multiple of {2 * heads}, twice model.num_attention_heads, with model.build={model.build}"
    fix = f"write model.hidden_size={hidden + -hidden % (2 * heads)}"
    return [Problem(path="model.hidden_size", rule=rule, value=show(hidden), fix=fix)]


@rule
def engine_supports_the_model(config: RunConfig) -> list[Problem]:
    if config.rollout.engine != EngineKind.embedded or not uses_engines(config):
        return []
    family = architecture_field(config.model, "model_type")
    # An unknown family is checked by the engine when it reads the checkpoint.
    if family is None or find_family(family).embedded:
        return []
    rule = f"be sglang or external with model.model_type={family}"
    fix = f"choose rollout=sglang; the embedded engine supports {', '.join(names_with('embedded'))}"
    return [Problem(path="rollout.engine", rule=rule, value=show(config.rollout.engine), fix=fix)]


@rule
def expert_counts_are_consistent(config: RunConfig) -> list[Problem]:
    """The router selects some groups of equal size and some of their experts for each token."""
    model = config.model
    # Selected per token, and the number to select from.
    limits = {"num_experts_per_tok": ("num_experts", model.num_experts), "topk_group": ("n_group", model.n_group)}
    problems = [
        Problem(
            path=f"model.{name}",
            rule=f"be at most model.{total}={limit}",
            value=show(getattr(model, name)),
            fix=_FROM_CHECKPOINT,
        )
        for name, (total, limit) in limits.items()
        if limit is not None and (getattr(model, name) or 0) > limit
    ]
    if model.num_experts is not None and model.n_group is not None and model.num_experts % model.n_group:
        rule = f"divide model.num_experts={model.num_experts}"
        problems.append(Problem(path="model.n_group", rule=rule, value=show(model.n_group), fix=_FROM_CHECKPOINT))
    return problems


@rule
def lengths_fit(config: RunConfig) -> list[Problem]:
    """The longest prompt plus the longest response fits the context, and the context fits the model.

    With `rollout.max_context_len` each response is cut to what its prompt leaves, so its limit may be the context.
    """
    rollout, positions = config.rollout, architecture_field(config.model, "max_position_embeddings")
    context = rollout.max_context_len
    responses = {
        "rollout.max_response_len": rollout.max_response_len,
        "eval.max_response_len": config.eval.max_response_len,
    }
    # A prompt has at least one token.
    name, limit, prompt = "model.max_position_embeddings", positions, rollout.max_prompt_len or 1
    if context is not None:
        name, limit, prompt = "rollout.max_context_len", context, 0
    problems = [
        Problem(
            path=path,
            rule=f"be at most {name}={limit}" + f" minus a prompt of {count_noun(prompt, 'token')}" * (prompt > 0),
            value=show(length),
            fix=f"set {path}={limit - prompt} or less" if limit > prompt else "lower rollout.max_prompt_len",
        )
        for path, length in responses.items()
        if limit is not None and length is not None and prompt + length > limit
    ]
    if context is not None and positions is not None and context > positions:
        rule = f"be at most model.max_position_embeddings={positions}"
        fix = f"set it to {positions} or less, or remove it"
        problems.append(Problem(path="rollout.max_context_len", rule=rule, value=show(context), fix=fix))
    return problems


@rule
def prompts_leave_a_token(config: RunConfig) -> list[Problem]:
    """The longest prompt leaves at least one token of the context."""
    context, longest = config.rollout.max_context_len, config.rollout.max_prompt_len
    if context is None or longest is None or longest < context:
        return []
    rule = f"be below rollout.max_context_len={context}"
    fix = f"set it to {context - 1} or less, or remove it"
    return [Problem(path="rollout.max_prompt_len", rule=rule, value=show(longest), fix=fix)]


@rule
def top_k_is_off_or_positive(config: RunConfig) -> list[Problem]:
    values = {"rollout.top_k": config.rollout.top_k, "eval.top_k": config.eval.top_k}
    return [
        Problem(path=path, rule="be -1 (off) or at least 1", value="0", fix=f"set {path}=-1")
        for path, value in values.items()
        if value == 0
    ]


@rule
def megatron_supports_the_architecture(config: RunConfig) -> list[Problem]:
    """Megatron-core supports the architecture in the checkpoint's config.json, and no key contradicts it."""
    model = config.model
    if not uses_megatron(config):
        return []
    keys = megatron_keys(model, config.megatron)
    if model.build is not None:
        # The resolve step, which follows, sets `model.use_hf_config_for_megatron` for these models.
        return check_architecture(tiny_config_json(model.build, keys.fields), replace(keys, uses_hf_config=True))
    config_json = read_config_json(model.hf_checkpoint)
    if not config_json:
        # The rest is checked by the trainer, which has the checkpoint.
        return [] if model.model_type is None else check_bridge(model.model_type, keys)
    return check_architecture(config_json, keys)


def check_given_rope_type(config: RunConfig, given: Collection[str]) -> list[Problem]:
    """Checks `megatron.rope_type=rope`, which is also the default, against the checkpoint if it was set explicitly.

    Args:
        config: already checked by the rules, which do not check this value with `model.use_hf_config_for_megatron`.
        given: keys that a file or the command line sets.
    """
    model, megatron = config.model, config.megatron
    is_checked = uses_megatron(config) and model.use_hf_config_for_megatron
    if "megatron.rope_type" not in given or not is_checked or megatron.rope_type != RopeType.rope:
        return []
    config_json = read_config_json(model.hf_checkpoint)
    return check_rope_type(config_json, megatron.rope_type) if config_json else []


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=(
            "model.custom_model_provider_path",
            "model.megatron_to_hf_mode",
            "model.name",
            "model.padded_vocab_size",
            "model.use_hf_config_for_megatron",
        ),
        when=lambda config: not uses_megatron(config),
        why="train.backend is not megatron",
    ),
    IgnoredKey(
        names=("model.ref_load", "model.ref_ckpt_step"),
        when=lambda config: not uses_reference(config.algo),
        why="there is no reference model: neither algo.use_kl_loss nor algo.kl_coef is set",
    ),
    IgnoredKey(
        names=("model.teacher_load", "model.teacher_url", "data.teacher_by_source"),
        when=lambda config: not uses_teacher(config.algo),
        why="there is no distillation: algo.opd_kl_coef is 0, or no advantages are computed",
    ),
    *(
        IgnoredKey(
            names=tuple(f"model.{name}" for name in CONFIG_NAMES if name not in fields),
            when=lambda config, build=build: config.model.build == build,  # type: ignore[misc]
            why=f"model.build={build} does not have this architecture key",
        )
        for build, fields in TINY_MODELS.items()
    ),
    IgnoredKey(
        names=("model.warmup_experiment",),
        when=lambda config: config.rollout.engine == EngineKind.scripted,
        why="a script answers without weights (rollout.engine=scripted)",
    ),
    IgnoredKey(
        names=("model.init_seed",),
        when=lambda config: config.model.build is None,
        why="model.build is not set",
    ),
)
