"""A config as plain values, as YAML and as a hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from rlscale.config.group import ConfigGroup
from rlscale.config.run import RunConfig

_NOT_HASHED = ("run", "logging", "debug")


def to_dict(config: ConfigGroup) -> dict[str, Any]:
    """The config, or one group, as nested JSON values."""
    plain = _plain(asdict(config))  # type: ignore[call-overload]  # every ConfigGroup is a dataclass
    assert isinstance(plain, dict)
    return plain


def to_yaml(config: ConfigGroup) -> str:
    """The config, or one group, as YAML that Hydra reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def config_hash(config: RunConfig) -> str:
    """Eight hex digits that change with everything that can change a run's numbers.

    Leaves out `run`, `logging`, `debug` and `checkpoint.save`, which is derived from the run's name.
    """
    values = {name: group for name, group in to_dict(config).items() if name not in _NOT_HASHED}
    del values["checkpoint"]["save"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
