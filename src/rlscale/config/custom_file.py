"""The file of `custom_config_path`, whose values are merged into the node `custom`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.groups.custom import PARAMETER
from rlscale.config.hydra.internals import YamlLoader
from rlscale.config.problems import show
from rlscale.config.yaml_aliases import load_yaml, read_yaml_text
from rlscale.errors import Problem


def merge_custom_file(values: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Merges the file of `custom_config_path` into `values["custom"]`: over YAML files, under the command line.

    Args:
        values: the composed config, nested; its node `custom` is changed.
        overrides: command-line overrides as passed to Hydra, e.g. `++custom.max_turns=5`.

    Returns: problems of the file; if there are any, nothing was merged.
    """
    path = values.get("custom_config_path")
    if not isinstance(path, str) or not path:
        return []  # absent, or reported as a wrong type
    try:
        # The file is needed before all interpolations are resolved; one of the environment can be resolved alone.
        path = str(OmegaConf.create({"path": path})["path"])
    except OmegaConfBaseException:
        return []  # reported with the other interpolations
    try:
        # Numbers and dates as in the files of options: 1e-5 is a number, 2026-11-26 a text.
        content: Any = load_yaml(read_yaml_text(Path(os.path.expanduser(path))), YamlLoader)
        json.dumps(content)  # neither bytes nor a value that contains itself
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        return [Problem(path="custom_config_path", rule="name a readable YAML file", value=path, fix=text)]
    if not isinstance(content, Mapping):
        rule = "name a YAML file with a mapping"
        value = f"{path}, which contains {'nothing' if content is None else show(content)[:40]}"
        return [Problem(path="custom_config_path", rule=rule, value=value, fix="write `name: value` lines")]
    before = values.get(PARAMETER)
    if before is not None and not isinstance(before, Mapping):
        return []  # reported as a wrong type
    merged = _merge(before or {}, content)
    for keys in _overridden_paths(overrides):
        _set_path(merged, keys, _pick(before, keys))
    values[PARAMETER] = merged
    return []


def _overridden_paths(overrides: Sequence[str]) -> list[list[str]]:
    """Paths below `custom` that the command line sets; an empty path is the node itself."""
    paths = (override.partition("=")[0].lstrip("+").split(".") for override in overrides)
    return [path[1:] for path in paths if path[0] == PARAMETER]


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[str(name)] = _merge(merged[name], value) if both else value
    return merged


def _pick(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def _set_path(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    if not keys:
        assert isinstance(value, Mapping), show(value)
        values |= _merge(values, value)
        return
    for key in keys[:-1]:
        values[key] = dict(values[key]) if isinstance(values.get(key), Mapping) else {}
        values = values[key]
    values[keys[-1]] = value
