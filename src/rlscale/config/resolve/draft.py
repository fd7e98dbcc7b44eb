"""A config under construction that records every value that is derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.run_config import RunConfig

MACHINE_KEYS = frozenset(
    {
        "cluster.device",
        "cluster.distributed_backend",
        "cluster.offload_train_mode",
        "fsdp.attn_implementation",
    }
)
"""Keys whose default is replaced on one machine and kept on another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """A value that was not given, or that replaced the given one."""

    key: str
    value: Any
    why: str
    was: Any = None  # the replaced value; None when none was given

    def __str__(self) -> str:
        return f"{self.key} = {show(self.value)}: {self.why}"

    @property
    def is_notable(self) -> bool:
        """Whether it replaces a given value, or a default that another machine would keep."""
        return self.was is not None and (self.key in MACHINE_KEYS or self.was != keys()[self.key].default)


@dataclass(kw_only=True, slots=True)
class Draft:
    """A writable config and the values derived so far.

    Example:
        draft = Draft(config=config.writable_copy())
        draft.fill("algo.eps_clip_high", 0.2, "algo.eps_clip")
        draft.derived[-1].why  # "algo.eps_clip"
    """

    config: RunConfig
    derived: list[Derived] = field(default_factory=list)

    def passed(self, group: str) -> Mapping[str, Any]:
        """The arguments that a group passes to its library."""
        owner = getattr(self.config, group)
        return dict(getattr(owner, owner.passthrough_field))

    def get(self, key: str) -> Any:
        group, _, name = key.rpartition(".")
        owner = attrgetter(group)(self.config)
        # A key that the group passes to its library.
        return getattr(owner, name) if key in keys() else getattr(owner, owner.passthrough_field).get(name)

    def replace(self, key: str, value: Any, why: str) -> None:
        """Sets a key and records it; does nothing when it has the value."""
        was = self.get(key)
        if was == value:
            return
        group, _, name = key.rpartition(".")
        owner = attrgetter(group)(self.config)
        if key in keys():
            setattr(owner, name, value)
        else:
            getattr(owner, owner.passthrough_field)[name] = value
        self.derived.append(Derived(key=key, value=value, why=why, was=was))

    def fill(self, key: str, value: Any, why: str) -> None:
        """Like `replace`, but only when the key is unset."""
        # A given value takes precedence over a derived one.
        if self.get(key) is None:
            self.replace(key, value, why)
