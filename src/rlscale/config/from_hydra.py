"""Configs that another Hydra application composed from the groups of `rlscale.register()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.hydra.compose import Composed
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import CommandLine
from rlscale.config.hydra.yaml_files import set_nested
from rlscale.config.keys import keys, nodes
from rlscale.config.load import load_composed
from rlscale.config.passthrough import passthrough_groups
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem

ORIGIN = "composed config"


@dataclass(kw_only=True)
class ComposedElsewhere(Composed):
    """Values without a command line or files of rlscale."""

    def is_given(self, path: str) -> bool:
        return bool(self.origin(path))

    def origin(self, path: str) -> str:
        known = self.command_line_keys
        return ORIGIN if any(path == key or path.startswith(f"{key}.") for key in known) else ""


def config_from_hydra(config: DictConfig | Mapping[str, Any]) -> RunConfig:
    """Checks and resolves a config that Hydra composed, as `load_config` does with a command line.

    Groups and keys that it lacks have their defaults. `run.overrides` stays empty.

    Args:
        config: nested values by group, e.g. `config.rlscale` of an application; may refer to other values of it.

    Raises: ConfigError with every problem that was found.
    """
    values: dict[str, Any] = {}
    for path, value in _leaves(_plain(config), ""):
        # A typed group has a value for every key; the rules tell given keys from those with their default.
        if path not in keys() or value != keys()[path].default:
            set_nested(values, path, value)
    composed = ComposedElsewhere(
        values=values,
        overrides=(),
        command_line_keys={path for path, _ in _leaves(values, "")},
        folders=ConfigFolders.find(),
    )
    line = CommandLine(experiment=(values.get("run") or {}).get("experiment"))
    return load_composed(composed, line, ()).config


def _plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with resolved interpolations; enums as their names."""
    try:
        node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        values = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        path = str(getattr(error, "full_key", None) or "config")
        fix = "correct the interpolation"
        problem = Problem(path=path, rule="be resolvable", value=f'"{str(error).splitlines()[0]}"', fix=fix)
        raise ConfigError([problem]) from error
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Values by path; arguments of a library as keys of their group."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        group = path.partition(".")[0]
        if name == passthrough_groups().get(group) and isinstance(value, Mapping):
            yield from ((f"{group}.{argument}", each) for argument, each in value.items())
        elif path in nodes() and isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        # A required group that nothing set is missing as a whole; its keys are reported.
        elif not (path in nodes() and value in (None, MISSING)):
            yield path, value
