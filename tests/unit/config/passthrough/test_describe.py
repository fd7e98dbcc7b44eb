"""Arguments of a server, read from a dataclass and from a msgspec struct, as in SGLang's versions."""

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Optional

import pytest

from rlscale.config.passthrough.describe import describe, type_text


class Mode(enum.Enum):
    fast = "fast"
    slow = "slow"


class Number(enum.Enum):
    one = 1
    two = enum.auto()


@dataclass
class AsDataclass:
    model_path: str
    tp_size: int = 1
    mem_fraction_static: float | None = None
    sizes: list[int] | None = None
    mode: Mode = Mode.fast
    extra: dict[str, Any] = field(default_factory=dict)
    _private: int = 0


class AsStruct:
    """Looks like a msgspec.Struct: names in `__struct_fields__`, hints as usual."""

    __struct_fields__: ClassVar[tuple[str, ...]] = ("model_path", "tp_size", "_private")
    model_path: str
    tp_size: Annotated[int, "help"]
    _private: int


def test_a_dataclass() -> None:
    assert describe(AsDataclass) == {
        "model_path": "str",
        "tp_size": "int",
        "mem_fraction_static": "float|null",
        "sizes": "list[int]|null",
        "mode": '"fast"|"slow"',
        "extra": "dict",
    }


def test_a_struct() -> None:
    assert describe(AsStruct) == {"model_path": "str", "tp_size": "int"}


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a msgspec struct or a dataclass"):
        describe(int)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Optional[bool], "bool|null"),  # noqa: UP045  SGLang writes it so
        (Literal["a", "b"] | None, '"a"|"b"|null'),
        (list, "list[any]"),
        (list[str | int], "list[str|int]"),
        (Annotated[str | None, "x"], "str|null"),
        (object, "any"),
        (Number | None, '"one"|"two"|null'),
        (int | int, "int"),
    ],
)
def test_types(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text
