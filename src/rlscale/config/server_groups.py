"""Groups of SGLang servers that divide the work of a request: prefill servers and decode servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SIZE = "num_gpus_per_engine"
"""Entry of a group in `sglang.server_groups`, if prefill and decode engines have different sizes."""


class ServerRole(StrEnum):
    """Part of a request that a server computes. Also the value of SGLang's `disaggregation_mode`."""

    prefill = "prefill"
    decode = "decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerGroup:
    """Servers of one role. Its engines have consecutive numbers: those of the prefill group come first."""

    role: ServerRole
    num_gpus: int
    num_gpus_per_engine: int
    server_args: Mapping[str, Any] = field(default_factory=dict)  # in addition to those of all engines

    @property
    def num_engines(self) -> int:
        """Engines of the group."""
        return self.num_gpus // self.num_gpus_per_engine


def read_server_groups(values: Mapping[str, Any], num_gpus_per_engine: int) -> tuple[ServerGroup, ...]:
    """The groups of the key `sglang.server_groups`; empty if it has another form than the file gives it.

    Args:
        num_gpus_per_engine: of a group that has none.
    """
    groups = []
    for role in ServerRole:
        group = values.get(role)
        if not isinstance(group, Mapping) or not isinstance(group.get("num_gpus"), int):
            return ()
        size = group.get(SIZE, num_gpus_per_engine)
        if not isinstance(size, int) or size < 1:
            return ()
        groups.append(
            ServerGroup(
                role=role,
                num_gpus=group["num_gpus"],
                num_gpus_per_engine=size,
                server_args=dict(group.get("server_args") or {}),
            )
        )
    return tuple(groups)


class _View:
    """A config, or a group of it, with other values of some keys.

    Passes on all other keys, so that reads of them are recorded.
    """

    def __init__(self, config: Any, values: Mapping[str, Any]) -> None:
        self._config, self._values = config, values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        value, start = getattr(self._config, name), f"{name}."
        within = {path[len(start) :]: other for path, other in self._values.items() if path.startswith(start)}
        return _View(value, within) if within else value


def view_group(config: Any, group: ServerGroup) -> Any:
    """The config of a run whose engines are all those of a group: a `RunConfig` to read, not to copy."""
    return _View(
        config,
        {
            "cluster.rollout_num_gpus": group.num_gpus,
            "cluster.rollout_num_gpus_per_engine": group.num_gpus_per_engine,
            "sglang.server_args": {**config.sglang.server_args, **group.server_args},
            "sglang.server_groups": {},
        },
    )
