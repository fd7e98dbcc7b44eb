"""What every config group shares: unknown keys are refused, and a resolved config is read-only."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import FrozenInstanceError, fields
from typing import Any, ClassVar, Self

from pydantic import ConfigDict


class ConfigGroup:
    """Base of the dataclasses that make up a RunConfig.

    A group is writable until `freeze` (Hydra and pydantic have to fill it) and read-only after it; a copy made with
    `dataclasses.replace` or `copy.deepcopy` is writable again.
    """

    # Without it pydantic drops keys it does not know in silence.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    passthrough_field: ClassVar[str | None] = None
    """Field of a group with the values of keys that a library knows; they count as keys of the group itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen", False):
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} must not be written after the config is resolved, got {value!r}; "
                f"set it on the command line or make a copy with dataclasses.replace"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(**{field.name: deepcopy(getattr(self, field.name), memo) for field in fields(self)})  # type: ignore[arg-type]

    def freeze(self) -> None:
        """Makes this group, and the groups in it, read-only."""
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, ConfigGroup):
                value.freeze()
        self.__dict__["_frozen"] = True

    def writable_copy(self) -> Self:
        """A deep copy that may be written, also of a group that is read-only."""
        copy = deepcopy(self)
        copy._thaw()
        return copy

    def _thaw(self) -> None:
        self.__dict__.pop("_frozen", None)
        for value in vars(self).values():
            if isinstance(value, ConfigGroup):
                value._thaw()
