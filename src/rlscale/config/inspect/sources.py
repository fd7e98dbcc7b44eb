"""Reads a configuration from a run folder, a YAML file, an experiment, or a command line."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.load import load_config_with_notes
from rlscale.config.problems import nearest
from rlscale.config.serialize import to_dict
from rlscale.config.yaml_aliases import load_yaml
from rlscale.errors import ConfigError, Problem

CONFIG_FILE = "config.yaml"  # in a run folder


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSource:
    """A complete configuration as nested plain values."""

    name: str
    values: dict[str, Any]


def read_source(text: str, *, config_dir: Path | None = None) -> ConfigSource:
    """Reads a configuration.

    Args:
        text: a run folder, its `config.yaml`, the name of an experiment, or overrides in one string
            (`experiment=quickstart algo=gspo`).
        config_dir: as in `load_config`.

    Raises: ConfigError when it is none of these, or invalid.
    """
    path = Path(os.path.expanduser(text))
    file = path / CONFIG_FILE if path.is_dir() else path
    if file.is_file():
        return ConfigSource(name=text, values=_read_file(file))
    experiments = ConfigFolders.find(config_dir).groups()["experiment"]
    # Without `=` it can only be the name of an experiment.
    if "=" not in text and text not in experiments:
        found = nearest(text, experiments)
        fix = f"did you mean {found}?" if found else f"experiments: {', '.join(experiments)}"
        rule = "be a run folder, a config.yaml, an experiment or overrides of a command line"
        raise ConfigError([Problem(path="configuration", rule=rule, value=text, fix=fix)])
    try:
        overrides = shlex.split(text) if "=" in text else [f"experiment={text}"]
    except ValueError as error:  # a quote without its end
        problem = Problem(path="configuration", rule="be words as in a shell", value=text, fix=f"{error}".lower())
        raise ConfigError([problem]) from error
    loaded = load_config_with_notes(overrides, config_dir=config_dir, to_run=False)
    return ConfigSource(name=text, values=to_dict(loaded.config))


def _read_file(file: Path) -> dict[str, Any]:
    fix = f"name a run folder, or the {CONFIG_FILE} in it"
    try:
        values = load_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(path=str(file), rule="be readable", value=str(error), fix=fix)]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(path=str(file), rule="be valid YAML", value=f'"{error}"', fix=fix)]) from error
    if not isinstance(values, dict) or "batch" not in values:
        raise ConfigError([Problem(path=str(file), rule="contain a complete config", value="something else", fix=fix)])
    return values
