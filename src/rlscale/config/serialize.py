"""A config as plain values, as YAML and as a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

import yaml

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.hydra.internals import YamlDumper
from rlscale.config.run_config import RunConfig
from rlscale.secrets import redact

_NOT_HASHED = ("run", "logging", "debug")


def to_dict(config: ConfigGroup) -> dict[str, Any]:
    """The config, or one group, as nested JSON values."""
    plain: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]  # every ConfigGroup is a dataclass
        value = getattr(config, field.name)
        if field.name == config.passthrough_field:
            # Entries of a library are keys of the group, as on the command line.
            plain |= _plain(value)
        else:
            plain[field.name] = to_dict(value) if isinstance(value, ConfigGroup) else _plain(value)
    return plain


def to_yaml(config: ConfigGroup) -> str:
    """The config, or one group, as YAML that Hydra can read."""
    # OmegaConf quotes what its loader would read as another type, e.g. the string 1e-5. Its own function first copies
    # all values into nodes, which takes most of its time.
    plain = to_dict(config)
    return yaml.dump(plain, Dumper=YamlDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits that change with every setting that can change the numeric results of a run.

    Excludes `run`, `logging`, `debug`, the values of secrets, and `checkpoint.save`, which is derived from the run's
    name.
    """
    return hashlib.sha256(json.dumps(_hashed_values(to_dict(config)), sort_keys=True).encode()).hexdigest()[:8]


def changed_keys(before: str, after: str) -> list[str]:
    """Differences of two configs, as `optim.lr: 0.001 -> 0.0005`, in the keys that enter the hash.

    Args:
        before, after: YAML as `to_yaml` writes it.
    """
    old, new = (dict(flatten(_hashed_values(yaml.safe_load(text)))) for text in (before, after))
    missing = "(none)"
    return [
        f"{key}: {old.get(key, missing)} -> {new.get(key, missing)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing)
    ]


def _hashed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that enter the hash; a replaced API key does not make another run."""
    kept: dict[str, Any] = redact({name: group for name, group in values.items() if name not in _NOT_HASHED})
    kept["checkpoint"] = {name: value for name, value in kept["checkpoint"].items() if name != "save"}
    return kept


def flatten(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their full path; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
