"""Resolves the config group `model` to a Hugging Face folder or hub id.

Imports no torch: a driver that finds its model in the cache does not need it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlscale.architectures.family import find_family, load_families
from rlscale.architectures.hf_config import CONFIG_NAMES, hf_fields, read_hf_fields
from rlscale.config import ModelConfig
from rlscale.errors import ConfigError, Problem
from rlscale.models.model_path import WEIGHT_FILES, looks_like_path
from rlscale.models.tiny import build_model
from rlscale.models.whole_files import find_incomplete

_KEY = "model.hf_checkpoint"


def resolve_model(config: ModelConfig) -> str:
    """Returns the folder of the model's weights and tokenizer, built now with `model.build`; or a hub id.

    Checks a folder: config.json, architecture, weights, and the fields set in `model.*`. Of a hub id it checks the
    fields if its config.json is in the local cache.

    Raises:
        ConfigError: no model is set, the folder is no usable checkpoint, or it differs from a field that is set.
    """
    if config.build is not None:
        return str(build_model(config, cache_root(config.cache_dir)))
    if config.hf_checkpoint is None:
        raise ConfigError(
            [_problem("be set", "None", "give a Hugging Face folder or hub id, or choose model=tiny_qwen3")]
        )
    check_model(config, config.hf_checkpoint)
    folder = Path(os.path.expanduser(config.hf_checkpoint))
    return str(folder.resolve()) if folder.exists() else config.hf_checkpoint


def check_model(config: ModelConfig, checkpoint: str) -> None:
    """Checks a folder or hub id against the fields set in `model.*`; builds and loads nothing.

    Raises:
        ConfigError: it cannot be used; a problem of the path names `model.hf_checkpoint`.
    """
    folder = Path(os.path.expanduser(checkpoint))
    if folder.exists():
        check_checkpoint(folder, config)
        return
    if looks_like_path(checkpoint):
        raise ConfigError([_problem("name an existing folder or a hub id", repr(checkpoint), "e.g. Qwen/Qwen3-4B")])
    # Only the config.json of a model that was downloaded before is known before the run.
    if problems := _field_problems(checkpoint, read_hf_fields(checkpoint), config):
        raise ConfigError(problems)


def is_hf_folder(path: str) -> bool:
    """Returns True for a Hugging Face folder, as opposed to a training checkpoint."""
    return (Path(os.path.expanduser(path)) / "config.json").is_file()


def cache_root(cache_dir: str | None) -> Path:
    """Root of the cache of built models: `cache_dir`, else $RLSCALE_CACHE, else ~/.cache/rlscale."""
    root = cache_dir or os.environ.get("RLSCALE_CACHE") or "~/.cache/rlscale"
    return Path(os.path.expanduser(root)).resolve()


def check_checkpoint(folder: Path, config: ModelConfig) -> None:
    """Raises ConfigError, with all problems, unless transformers can load `folder` and it fits `config`."""
    if not folder.is_dir():
        raise ConfigError([_problem("be a folder", f"the file {str(folder)!r}", "give its folder")])
    fields = _read_config(folder)
    problems = []
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        fix = f"it has neither {' nor '.join(WEIGHT_FILES)}; save the model with safetensors"
        problems.append(_problem("be a folder with weights", repr(str(folder)), fix))
    elif incomplete := find_incomplete(folder):
        fix = f"{incomplete}; download or copy it again"
        problems.append(_problem("be a folder with complete weights", repr(str(folder)), fix))
    problems += _architecture_problems(folder, fields)
    problems += _field_problems(str(folder), hf_fields(fields), config)
    if problems:
        raise ConfigError(problems)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        fix = "it has no config.json; give a folder written by save_pretrained"
        raise ConfigError([_problem("be a Hugging Face checkpoint", repr(str(folder)), fix)])
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = f"its config.json is not JSON: {error}"
        raise ConfigError([_problem("be a Hugging Face checkpoint", repr(str(folder)), fix)]) from error
    if not isinstance(fields, dict):
        fix = "its config.json is not an object"
        raise ConfigError([_problem("be a Hugging Face checkpoint", repr(str(folder)), fix)])
    return fields


def _architecture_problems(folder: Path, fields: dict[str, Any]) -> list[Problem]:
    architectures = fields.get("architectures") or []
    if _causal_class(fields.get("model_type")) in architectures:
        return []
    # Imported here: it takes 0.5 s, and a hub id or a model of a known family does not need it.
    import transformers

    known = dir(transformers)  # lists the lazy names without importing any model
    if any(name in known and name.endswith("ForCausalLM") for name in architectures):
        return []
    if find_family(fields.get("model_type")).vision and any(name in known for name in architectures):
        return []
    got = f"{', '.join(map(str, architectures)) or 'no architecture'} in {str(folder)!r}"
    fix = f"choose one whose architecture is a class of transformers {transformers.__version__} ending in ForCausalLM"
    return [_problem("be a causal language model that transformers supports", got, fix)]


def _causal_class(model_type: object) -> str | None:
    """The class of transformers for a known family; None: unknown here."""
    family = load_families().get(str(model_type))
    if family is None:
        return None
    words = (family.transformers_name or family.name).split("_")
    return "".join(word.title() for word in words) + "ForCausalLM"


def _field_problems(checkpoint: str, fields: Mapping[str, Any], config: ModelConfig) -> list[Problem]:
    problems = []
    for key in CONFIG_NAMES:
        expected, found = getattr(config, key), fields.get(key)
        if expected is not None and found is not None and expected != found:
            fix = "leave it unset, or choose another checkpoint"
            rule = f"be {found}, as in config.json of {checkpoint!r}"
            problems.append(Problem(path=f"model.{key}", rule=rule, value=str(expected), fix=fix))
    return problems


def _problem(rule: str, value: str, fix: str) -> Problem:
    return Problem(path=_KEY, rule=rule, value=value, fix=fix)
