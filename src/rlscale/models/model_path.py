"""Checks of a path or hub id of a model, without transformers and without the network."""

from __future__ import annotations

import os
from pathlib import Path

from rlscale.architectures.hf_config import read_config_json
from rlscale.errors import ConfigError, Problem
from rlscale.models.whole_files import find_incomplete

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")


def check_model_path(given: str, *, name: str) -> list[Problem]:
    """Problems of a value that must be a Hugging Face folder with weights, or a hub id.

    A hub id is known to be wrong only where the network is off and the local cache does not have it.

    Args:
        name: of the key, argument or flag that has the value.
    """

    def problem(rule: str, fix: str) -> list[Problem]:
        return [Problem(path=name, rule=rule, value=repr(given), fix=fix)]

    folder = Path(os.path.expanduser(given))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fix = "it has no config.json; give a folder written by save_pretrained"
            return problem("be a Hugging Face checkpoint", fix)
        if not any((folder / each).is_file() for each in WEIGHT_FILES):
            fix = f"it has neither {' nor '.join(WEIGHT_FILES)}; save the model with safetensors"
            return problem("be a folder with weights", fix)
        if incomplete := find_incomplete(folder):
            return problem("be a folder with complete weights", f"{incomplete}; download or copy it again")
        return []
    if folder.exists():
        return problem("be a folder", "it is a file; give its folder")
    if looks_like_path(given):
        return problem("name an existing folder or a hub id", "e.g. Qwen/Qwen3-4B")
    return check_offline(given, name=name)


def check_offline(hub_id: str, *, name: str) -> list[Problem]:
    """Problem of a hub id that is not in the local cache while the environment turns the network off."""
    # As in huggingface_hub: the first variable that is set decides.
    variable = next((each for each in _OFFLINE_VARIABLES if os.environ.get(each)), None)
    if variable is None or os.environ[variable].upper() not in _TRUE or read_config_json(hub_id):
        return []
    rule = f"be in the local cache of Hugging Face with {variable}={os.environ[variable]}"
    fix = f"download it where there is a network (hf download {hub_id}), or unset {variable}"
    return [Problem(path=name, rule=rule, value=hub_id, fix=fix)]


def looks_like_path(text: str) -> bool:
    """Whether a value cannot be a hub id, which is `<user>/<model>`."""
    return text.startswith(("/", ".", "~")) or text.count("/") != 1


def error_of_argument(error: ConfigError, *, name: str) -> str:
    """The problems of an error, one line each, for a command without config keys: its argument takes their place."""
    return "\n".join(
        f"{name} must {each.rule}, got {each.value}" + (f"; {each.fix}" if each.fix else "") for each in error.problems
    )
