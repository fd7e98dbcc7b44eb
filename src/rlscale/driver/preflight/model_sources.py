"""Checks of model folders, hub ids and checkpoints that a config names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import local_model_folder, read_config_json, read_hf_fields
from rlscale.architectures.vision import VisionLayout
from rlscale.checkpoint.store import CheckpointStore
from rlscale.checkpoint.weight_folders import is_bare_weights, is_checkpoint
from rlscale.config import (
    LossType,
    ModelConfig,
    RunConfig,
    TrainBackendName,
    compares_policies,
    uses_critic,
    uses_reference,
    uses_teacher,
)
from rlscale.config.rules.model import architecture_field
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.adapter_targets import ADAPTER_CONFIG, check_linear, check_scale, check_targets
from rlscale.models.model_path import check_offline, looks_like_path
from rlscale.models.parameter_names import folder_parameters, merged_by_megatron, tiny_parameters
from rlscale.models.resolve_model import check_model, is_hf_folder, resolve_model
from rlscale.training.modules.freeze import trained_names

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
"""Files of which a tokenizer has at least one."""

ROUTE_SIZES = ("num_layers", "num_experts_per_tok", "num_experts")
"""Fields that give the shape of expert routes."""

_POLICY = "model.hf_checkpoint"


def check_start(config: RunConfig) -> list[Problem]:
    """Problems of `checkpoint.load`: a folder of Hugging Face, of Megatron-core's format, or with checkpoints."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return _check_model("checkpoint.load", config.model, load)
    problems = _check_folder("checkpoint.load", load)
    if load is not None and config.debug.rollout_only:
        rule, fix = "name a Hugging Face folder with debug.rollout_only", "engines cannot read training checkpoints"
        return [Problem(path="checkpoint.load", rule=rule, value=load, fix=fix)]
    if load is None or problems:
        return problems
    if is_bare_weights(load):
        return _check_bare_weights("checkpoint.load", load, config.train.backend)
    folder = Path(os.path.expanduser(load))
    if not CheckpointStore.has_checkpoint(folder) and not CheckpointStore.is_leftover(folder):
        rule = "name a Hugging Face folder, a checkpoint of a run or a folder in Megatron-core's format (torch_dist)"
        fix = "it has no config.json, no checkpoint.json and no torch_dist/metadata.json; check the path"
        return [Problem(path="checkpoint.load", rule=rule, value=repr(load), fix=fix)]
    return _check_checkpoint("checkpoint.load", load)


def check_policy(config: RunConfig) -> list[Problem]:
    """Problems of `model.hf_checkpoint`, and of the tokenizer and the experts of the starting model."""
    problems = _check_model(_POLICY, config.model, config.model.hf_checkpoint) if config.model.build is None else []
    return problems or [*_check_tokenizer(config), *_check_experts(config)]


def check_roles(config: RunConfig) -> list[Problem]:
    """Problems of reference, teacher and critic, as far as their sources are not those of the policy."""
    model, backend = config.model, config.train.backend
    checked = (model.hf_checkpoint, config.checkpoint.load)
    problems: list[Problem] = []
    if model.ref_load not in checked or model.ref_ckpt_step is not None:
        step = model.ref_ckpt_step
        problems += _check_source("model.ref_load", model, model.ref_load, backend=backend, rollout_id=step)
    if (
        uses_teacher(config.algo) and model.teacher_load is not None
    ):  # of any architecture: the policy's fields do not apply
        problems += _check_source("model.teacher_load", ModelConfig(), model.teacher_load, backend=backend)
    if uses_critic(config.algo) and config.critic.load not in checked:
        problems += _check_source("critic.load", model, config.critic.load, backend=backend)
    return [*problems, *_check_images(config)]


def _check_images(config: RunConfig) -> list[Problem]:
    """Problems of models that get the images of the policy, prepared for it, and read no or other ones."""
    model = config.model
    roles = {
        "model.ref_load": model.ref_load if uses_reference(config.algo) else None,
        "model.teacher_load": model.teacher_load if uses_teacher(config.algo) else None,
        "critic.load": config.critic.load if uses_critic(config.algo) else None,
    }
    # A checkpoint of a trainer has no config.json: it is loaded into the policy's architecture.
    found = {key: _image_format(read) for key, path in roles.items() if (read := read_config_json(path))}
    if config.data.multimodal_keys is None or not found:
        return []
    policy = resolve_model(model) if model.build is not None else model.hf_checkpoint
    family, layout = _image_format(read_config_json(policy))
    rule = f"name a {family} model with the policy's patches and tokens"
    fix = "choose one that reads the same images, or remove data.multimodal_keys"
    return [
        Problem(path=key, rule=rule, value=str(roles[key]), fix=fix)
        for key, own in found.items()
        if layout is not None and own != (family, layout)
    ]


def _image_format(config_json: Mapping[str, Any]) -> tuple[str, VisionLayout | None]:
    """Family of a model, and patches and tokens of its images; None: it reads none."""
    family = find_family(config_json.get("model_type"))
    has_images = family.vision is not None and "vision_config" in config_json
    return family.name, VisionLayout.from_config_json(config_json) if has_images else None


def check_trained_parameters(config: RunConfig) -> list[Problem]:
    """Problems of patterns of parameter names and of the layers of adapters, where the names are known here."""
    train = config.train
    has_patterns = train.only_train_params is not None or train.freeze_params is not None
    targets = train.lora.target_modules if train.lora.rank else None
    if config.debug.rollout_only or not (has_patterns or targets):
        return []
    names = _parameter_names(config)
    if names is None and has_patterns:
        names = _vision_names(config)
    if names is None:
        return []
    problems: list[Problem] = []
    if has_patterns:
        try:
            trained_names(names, train, merged=_merged_names(config, names))
        except ConfigError as error:
            problems += error.problems
        except re.error:
            return []  # a rule of the config reports it
    linear = {name.split(".")[-2] for name in names if "_proj" in name and name.endswith(".weight")}
    found = check_targets(targets, names, linear=linear)
    wrong = [each for each in targets or () if not _may_be_linear(each, names)]
    return problems + (found or check_linear(wrong, linear=linear))


def _may_be_linear(layer: str, names: list[str]) -> bool:
    """Whether a name of a layer, or its last components, is that of a linear layer, as far as its weights show it."""
    is_other = any(part in layer.rpartition(".")[2] for part in ("embed", "norm", "lm_head"))
    return not is_other and any(f".{name}".endswith(f".{layer}.weight") for name in names)


def check_adapters(config: RunConfig) -> list[Problem]:
    """Problem of `train.lora.load` without adapters in peft's format, or with those of another scale."""
    lora = config.train.lora
    if lora.load is None or not lora.rank or config.debug.rollout_only:
        return []
    names = (ADAPTER_CONFIG, "adapter_model.safetensors")
    folder = Path(os.path.expanduser(lora.load))
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return check_scale(folder, alpha=lora.alpha)
    fix = f"it has no {' and no '.join(missing)}; check the path"
    return [Problem(path="train.lora.load", rule="be a folder of adapters in peft's format", value=lora.load, fix=fix)]


def starting_folder(config: RunConfig) -> Path | None:
    """The folder with configuration and tokenizer of the starting model; None: it is built, or not on this machine."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return Path(os.path.expanduser(load))
    return None if config.model.build is not None else local_model_folder(config.model.hf_checkpoint)


def _vision_names(config: RunConfig) -> list[str] | None:
    """Names of a model that reads images: only transformers knows them, which takes seconds; None: another model."""
    folder = starting_folder(config) or (resolve_model(config.model) if config.model.build is not None else None)
    if folder is None or find_family(read_config_json(str(folder)).get("model_type")).vision is None:
        return None
    import torch  # not loaded for other models: takes seconds

    from rlscale.models.hf_models import build_causal_lm  # the same

    return [name for name, _ in build_causal_lm(str(folder), dtype=torch.float32).named_parameters()]


def _parameter_names(config: RunConfig) -> list[str] | None:
    folder, model = starting_folder(config), config.model
    if folder is not None:
        return folder_parameters(folder, read_config_json(str(folder)))
    if model.build is None:
        return None
    given = ("num_layers", "tie_word_embeddings", "first_k_dense_replace")
    return tiny_parameters(model.build, {name: getattr(model, name) for name in given})


def _merged_names(config: RunConfig, names: list[str]) -> list[list[str]]:
    """Groups of parameters that the backend keeps in one tensor each."""
    if config.train.backend != TrainBackendName.megatron:
        return []
    return merged_by_megatron(names, architecture_field(config.model, "model_type"))


def _check_tokenizer(config: RunConfig) -> list[Problem]:
    folder = starting_folder(config)
    if folder is None or any((folder / name).is_file() for name in TOKENIZER_FILES):
        return []
    key = "checkpoint.load" if config.checkpoint.load is not None else _POLICY
    fix = f"it has none of {', '.join(TOKENIZER_FILES[:3])}; save the tokenizer there, too"
    return [Problem(path=key, rule="have a tokenizer", value=repr(str(folder)), fix=fix)]


def _check_experts(config: RunConfig) -> list[Problem]:
    """Problem of a replay of expert routes with a model whose `config.json` names no experts."""
    algo, folder = config.algo, starting_folder(config)
    has_old_pass = compares_policies(algo) and not algo.use_rollout_logprobs
    replayed = {
        "algo.use_rollout_routing_replay": algo.use_rollout_routing_replay and algo.loss_type != LossType.sft_loss,
        "algo.use_routing_replay": algo.use_routing_replay and has_old_pass,
    }
    keys = [key for key, is_set in replayed.items() if is_set]
    if not keys or config.debug.rollout_only or folder is None:
        return []
    fields = read_hf_fields(str(folder))
    if all(fields.get(name) is not None for name in ROUTE_SIZES):
        return []
    rule, fix = "be false with a model that has no experts", f"remove it, or check {folder}/config.json"
    return [Problem(path=keys[0], rule=rule, value="true", fix=fix)]


def _check_source(
    key: str,
    model: ModelConfig,
    path: str | None,
    *,
    backend: TrainBackendName,
    rollout_id: int | None = None,
) -> list[Problem]:
    """Problems of a Hugging Face folder or hub id, or of checkpoints of a trainer."""
    if path is None or not is_checkpoint(path):
        return _check_model(key, model, path)
    if is_bare_weights(path):
        return _check_bare_weights(key, path, backend)
    return _check_checkpoint(key, path, rollout_id=rollout_id)


def _check_checkpoint(key: str, path: str, *, rollout_id: int | None = None) -> list[Problem]:
    try:
        CheckpointStore.resolve(path, key=key, rollout_id=rollout_id)
    except ConfigError as error:
        return list(error.problems)
    except DataError as error:
        return [Problem(path=key, rule="name a checkpoint that can be read", value=path, fix=str(error))]
    return []


def _check_bare_weights(key: str, path: str, backend: TrainBackendName) -> list[Problem]:
    """Problem of weights in Megatron-core's format, which only its own backend reads."""
    if backend == TrainBackendName.megatron:
        return []
    rule = f"be a Hugging Face folder or a checkpoint of a run with train.backend={backend}"
    fix = f"it is in Megatron-core's format; convert it: rlscale-convert {path} <new folder>"
    return [Problem(path=key, rule=rule, value=path, fix=fix)]


def _check_folder(key: str, path: str | None) -> list[Problem]:
    if path is None or Path(os.path.expanduser(path)).is_dir():
        return []
    return [Problem(path=key, rule="name a folder that exists", value=path, fix="check the path")]


def _check_model(key: str, config: ModelConfig, checkpoint: str | None) -> list[Problem]:
    """Problems of a folder or a hub id."""
    if checkpoint is None:
        return []
    try:
        check_model(config, checkpoint)
    except ConfigError as error:
        # Only the problem of the path gets this key; a problem of a model field keeps the name of the field.
        return [replace(each, path=key) if each.path == _POLICY else each for each in error.problems]
    is_folder = looks_like_path(checkpoint) or Path(os.path.expanduser(checkpoint)).exists()
    return [] if is_folder else check_offline(checkpoint, name=key)
