"""Groups of SGLang servers that divide the work of a request: prefill servers and decode servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ServerRole(StrEnum):
    """Part of a request that a server computes. Also the value of SGLang's `disaggregation_mode`."""

    prefill = "prefill"
    decode = "decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerGroup:
    """Servers of one role. Its engines have consecutive numbers: those of the prefill group come first."""

    role: ServerRole
    num_gpus: int
    server_args: Mapping[str, Any] = field(default_factory=dict)  # in addition to those of all engines


def read_server_groups(values: Mapping[str, Any]) -> tuple[ServerGroup, ...]:
    """The groups of the key `sglang.server_groups`; empty if it has another form than the file gives it."""
    groups = []
    for role in ServerRole:
        group = values.get(role)
        if not isinstance(group, Mapping) or not isinstance(group.get("num_gpus"), int):
            return ()
        groups.append(
            ServerGroup(role=role, num_gpus=group["num_gpus"], server_args=dict(group.get("server_args") or {}))
        )
    return tuple(groups)
