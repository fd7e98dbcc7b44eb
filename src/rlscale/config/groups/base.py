"""Base class of config groups: rejects unknown keys, and is read-only once resolved."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import FrozenInstanceError, fields
from typing import Any, ClassVar, Self

from pydantic import ConfigDict

DOTTED_PATH = r"^(?:[A-Za-z_][\w.]*[:.]|(?:\./)?(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*\.py:)[A-Za-z_]\w*$"
"""Pattern of `package.module:name`, `package.module.name` or `folder/file.py:name`, shared by several keys."""

FOLDER_NAME = r"^[^/\\]*[^/\\.][^/\\]*$"
"""Pattern of the name of one folder: without separators, and not `.` or `..`."""


_ATOMIC = frozenset({type(None), bool, int, float, str})
"""Types whose values a deep copy shares."""


class ConfigGroup:
    """Base of the dataclasses that make up a RunConfig.

    A group is writable until `freeze`, because Hydra and pydantic fill it, and read-only afterwards. A copy made with
    `dataclasses.replace` or `copy.deepcopy` is writable again.
    """

    # By default pydantic drops unknown keys without an error.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    passthrough_field: ClassVar[str | None] = None
    """Field with the arguments that the group passes to a library; they are set like keys of the group."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen", False):
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} must not be written after the config is resolved, got {value!r}; "
                f"set it on the command line or make a copy with dataclasses.replace"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Without the calls of __init__ and __setattr__, which take most of the time. The copy is not frozen.
        copy = object.__new__(type(self))
        copy.__dict__.update(
            {
                name: value if type(value) in _ATOMIC else deepcopy(value, memo)
                for name, value in vars(self).items()
                if name != "_frozen"
            }
        )
        return copy

    def freeze(self) -> None:
        """Makes this group and its nested groups read-only."""
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, ConfigGroup):
                value.freeze()
        self.__dict__["_frozen"] = True

    def writable_copy(self) -> Self:
        """Returns a writable deep copy, including of a read-only group."""
        copy = deepcopy(self)
        copy._thaw()
        return copy

    def _thaw(self) -> None:
        self.__dict__.pop("_frozen", None)
        for value in vars(self).values():
            if isinstance(value, ConfigGroup):
                value._thaw()
