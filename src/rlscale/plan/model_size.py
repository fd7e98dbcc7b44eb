"""The architectures of the models of a run, from its config or from checkpoints on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from rlscale.architectures.architecture import REQUIRED_FIELDS, Architecture
from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import CONFIG_NAMES, architecture_fields, read_hf_fields
from rlscale.architectures.tower_shape import find_tower
from rlscale.config import ModelConfig, RunConfig, uses_critic, uses_reference, uses_teacher
from rlscale.config.hydra.config_folders import packaged_folder
from rlscale.errors import ConfigError, Problem


def policy_architecture(model: ModelConfig) -> Architecture:
    """The architecture of the policy: fields of the config, else of the checkpoint's `config.json`.

    Raises:
        ConfigError: fields are missing, and no `config.json` on this machine contains them.
    """
    given = {name: getattr(model, name) for name in CONFIG_NAMES}
    fields = architecture_fields(given, build=model.build, hf_checkpoint=model.hf_checkpoint)
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        fix = "choose a model whose fields are known (model=qwen3_4b), set it, or use a checkpoint on this machine"
        raise ConfigError(
            [Problem(path=f"model.{name}", rule="be known to plan a run", value="null", fix=fix) for name in missing]
        )
    return _with_tower(Architecture.from_fields(fields), build=model.build, checkpoint=model.hf_checkpoint)


def _with_tower(a: Architecture, *, build: str | None, checkpoint: str | None) -> Architecture:
    """An architecture with its vision tower, if the model has one and its shape is known."""
    if a.model_type is None or find_family(a.model_type).vision is None:
        return a
    return replace(a, tower=find_tower(a.model_type, build=build, hf_checkpoint=checkpoint, width=a.hidden_size))


def has_base_as_reference(config: RunConfig) -> bool:
    """Whether the reference is the policy without its adapters, so that it needs no weights."""
    model = config.model
    is_base = model.ref_load is None or model.ref_load == model.hf_checkpoint
    return config.train.lora.rank > 0 and is_base and uses_reference(config.algo)


def list_architectures(config: RunConfig, policy: Architecture) -> dict[str, Architecture]:
    """Architectures of all models of the trainers, by role. The critic has no output layer."""
    models, model = {"policy": policy}, config.model
    if uses_reference(config.algo):
        models["reference"] = _role_architecture(model.ref_load, policy)
    if uses_critic(config.algo):
        models["critic"] = replace(_role_architecture(config.critic.load, policy), tied=True)
    if uses_teacher(config.algo) and model.teacher_load is not None:  # a served teacher is on no GPU of the run
        models["teacher"] = _role_architecture(model.teacher_load, policy)
    return models


def judge_architecture(config: RunConfig, policy: Architecture) -> Architecture | None:
    """The architecture of the model of `reward.engine`.

    Returns: None if the model has no `config.json` on this machine, and is not that of an option of `conf/model/`. It
    is not taken for the policy's: a judge is usually larger.
    """
    checkpoint = config.reward.engine.hf_checkpoint
    if checkpoint is None or checkpoint == config.model.hf_checkpoint:
        return policy
    fields = read_hf_fields(checkpoint) or published_fields(checkpoint)
    if not all(name in fields for name in REQUIRED_FIELDS):
        return None
    return _with_tower(Architecture.from_fields(fields), build=None, checkpoint=checkpoint)


def published_fields(checkpoint: str) -> dict[str, Any]:
    """The architecture fields in the option of `conf/model/` that names this checkpoint. Empty if none does."""
    for file in sorted((packaged_folder() / "model").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        # Parsing every option takes longer than the rest of a plan.
        if checkpoint not in text:
            continue
        option = yaml.safe_load(text)
        if option.get("hf_checkpoint") == checkpoint:
            return {name: option[name] for name in CONFIG_NAMES if option.get(name) is not None}
    return {}


def _role_architecture(path: str | None, policy: Architecture) -> Architecture:
    """The architecture of the model of another role than the policy.

    Args:
        path: of the model. Without a `config.json` on this machine its architecture is taken for the policy's.
        policy: architecture of the policy.
    """
    fields = read_hf_fields(path)
    if not all(name in fields for name in REQUIRED_FIELDS):
        return policy
    return _with_tower(Architecture.from_fields(fields), build=None, checkpoint=path)


def route_bytes_per_token(a: Architecture) -> int:
    """Bytes of the expert indices of one token. Same as `expert_routes.RouteShape`, whose module imports numpy."""
    return a.num_layers * a.experts_per_token * (1 if a.num_experts <= 255 else 2)
