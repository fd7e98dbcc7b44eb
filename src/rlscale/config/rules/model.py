"""Rules about the model and the lengths it is used with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlscale.architectures.family import find_family, names_with
from rlscale.architectures.hf_config import CONFIG_NAMES, architecture_fields, read_config_json
from rlscale.architectures.megatron_fields import MegatronKeys, check_architecture, check_rope_type
from rlscale.config.errors import show
from rlscale.config.groups.megatron import MegatronConfig, RopeType
from rlscale.config.groups.model import MegatronToHf, ModelConfig
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.rules.rule import USES_ENGINES, rule, uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


def architecture_field(model: ModelConfig, name: str) -> Any:
    """One architecture field: set in the config, or else of the tiny model or the checkpoint. None: unknown."""
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


@rule("model.hf_checkpoint", "model.build")
def model_has_one_source(config: RunConfig) -> list[Problem]:
    model = config.model
    if model.hf_checkpoint is None and model.build is None:
        fix = "set it, or choose model=tiny_qwen3 for a small model made on the spot"
        return [Problem(path="model.hf_checkpoint", rule="name a model", value="null", fix=fix)]
    if model.hf_checkpoint is not None and model.build is not None:
        rule = f"not be set together with model.build={model.build}"
        fix = "add model=hf, which takes everything from the checkpoint"
        return [Problem(path="model.hf_checkpoint", rule=rule, value=model.hf_checkpoint, fix=fix)]
    return []


@rule("model.num_attention_heads", "model.num_key_value_heads")
def heads_divide(config: RunConfig) -> list[Problem]:
    heads, kv_heads = config.model.num_attention_heads, config.model.num_key_value_heads
    if heads is None or kv_heads is None or heads % kv_heads == 0:
        return []
    rule = f"divide model.num_attention_heads={heads}"
    fix = "take both from the checkpoint's config.json, or choose the model=<option> it is"
    return [Problem(path="model.num_key_value_heads", rule=rule, value=show(kv_heads), fix=fix)]


@rule("rollout.engine", "model.model_type", "model.build", "model.hf_checkpoint", *USES_ENGINES)
def engine_runs_the_model(config: RunConfig) -> list[Problem]:
    model = config.model
    if config.rollout.engine != EngineKind.embedded or not uses_engines(config):
        return []
    family = architecture_field(model, "model_type")
    if family is None or find_family(family).embedded:
        return []  # what is not known is told by the engine, when it reads the checkpoint
    rule = f"be sglang or external with model.model_type={family}"
    fix = f"choose rollout=sglang; the embedded engine runs {', '.join(names_with('embedded'))}"
    return [Problem(path="rollout.engine", rule=rule, value=show(config.rollout.engine), fix=fix)]


@rule("model.num_experts", "model.num_experts_per_tok", "model.n_group", "model.topk_group")
def experts_can_be_chosen(config: RunConfig) -> list[Problem]:
    """A token chooses some of the experts, from some of the groups that they are evenly divided into."""
    model = config.model
    limits = {"num_experts_per_tok": ("num_experts", model.num_experts), "topk_group": ("n_group", model.n_group)}
    fix = "take both from the checkpoint's config.json, or choose the model=<option> it is"
    problems = [
        Problem(path=f"model.{name}", rule=f"be at most model.{of}={limit}", value=show(getattr(model, name)), fix=fix)
        for name, (of, limit) in limits.items()
        if limit is not None and (getattr(model, name) or 0) > limit
    ]
    if model.num_experts is not None and model.n_group is not None and model.num_experts % model.n_group:
        rule = f"divide model.num_experts={model.num_experts}"
        problems.append(Problem(path="model.n_group", rule=rule, value=show(model.n_group), fix=fix))
    return problems


@rule(
    "rollout.max_prompt_len",
    "rollout.max_response_len",
    "rollout.max_context_len",
    "model.max_position_embeddings",
    "model.build",
    "model.hf_checkpoint",
    "eval.max_response_len",
)
def lengths_fit(config: RunConfig) -> list[Problem]:
    """The longest prompt with the longest response fits the context, and the context fits the model."""
    rollout, positions = config.rollout, architecture_field(config.model, "max_position_embeddings")
    limits = {"rollout.max_context_len": rollout.max_context_len, "model.max_position_embeddings": positions}
    responses = {
        "rollout.max_response_len": rollout.max_response_len,
        "eval.max_response_len": config.eval.max_response_len,
    }
    prompt = rollout.max_prompt_len or 1
    problems = [
        Problem(
            path=path,
            rule=f"fit {name}={limit} after a prompt of {prompt} tokens",
            value=show(length),
            fix=f"set {path}={limit - prompt} at most" if limit > prompt else "set a smaller rollout.max_prompt_len",
        )
        for name, limit in limits.items()
        for path, length in responses.items()
        if limit is not None and length is not None and prompt + length > limit
    ]
    context = rollout.max_context_len
    if context is not None and positions is not None and context > positions:
        rule = f"be at most model.max_position_embeddings={positions}"
        fix = f"set it to {positions} at most, or leave it out"
        problems.append(Problem(path="rollout.max_context_len", rule=rule, value=show(context), fix=fix))
    return problems


@rule("rollout.top_k", "eval.top_k")
def top_k_is_off_or_positive(config: RunConfig) -> list[Problem]:
    values = {"rollout.top_k": config.rollout.top_k, "eval.top_k": config.eval.top_k}
    return [
        Problem(path=path, rule="be -1 (off) or at least 1", value="0", fix=f"set {path}=-1")
        for path, value in values.items()
        if value == 0
    ]


@rule(
    "train.backend",
    "model.hf_checkpoint",
    "model.build",
    "model.name",
    "model.use_hf_config_for_megatron",
    "megatron.core_args",
    "megatron.rope_type",
    "megatron.max_position_embeddings",
    "model.megatron_to_hf_mode",
    *(f"model.{name}" for name in CONFIG_NAMES),
)
def megatron_has_the_architecture(config: RunConfig) -> list[Problem]:
    """Megatron-core can compute what the checkpoint's config.json describes, and no key contradicts it."""
    model = config.model
    if config.train.backend != TrainBackendName.megatron or model.build is not None:
        return []
    config_json = read_config_json(model.hf_checkpoint)
    if not config_json:
        return []  # the trainer looks again when it has the checkpoint
    return check_architecture(config_json, megatron_keys(model, config.megatron))


def rope_type_is_meant(config: RunConfig, given: Collection[str]) -> list[Problem]:
    """Whether `megatron.rope_type=rope`, which is what it is without a word as well, contradicts the checkpoint.

    Args:
        config: whose rules have been checked; they leave this out where the checkpoint's config.json is to count.
        given: keys that somebody has set.
    """
    model, megatron = config.model, config.megatron
    is_theirs = config.train.backend == TrainBackendName.megatron and model.use_hf_config_for_megatron
    if "megatron.rope_type" not in given or not is_theirs or megatron.rope_type != RopeType.rope:
        return []
    config_json = read_config_json(model.hf_checkpoint)
    return check_rope_type(config_json, megatron.rope_type) if config_json else []
