"""Every recorded field of Megatron-core arrives as the type that Megatron-core compares it with."""

import enum
import json
import types
import typing
from dataclasses import fields
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from rlscale.config.passthrough.field_types import alternatives, fits
from rlscale.config.passthrough.megatron_args import RECORDED, RESERVED
from rlscale.config.passthrough.recorded import read_recorded
from rlscale.training.megatron.model.field_values import field_values

HINTS = {
    name: hint
    for record in (MLATransformerConfig, OptimizerConfig)
    for name, hint in typing.get_type_hints(record).items()
    if name in {field.name for field in fields(record)}
}
SAMPLES: dict[str, Any] = {"bool": True, "int": 3, "float": 0.5, "str": "text", "null": None, "dict": {}}
PASSED = {
    name: kind
    for name, kind in read_recorded(RECORDED).types.items()
    if name not in RESERVED and kind not in ("any", "any|null")
}


def samples(kind: str) -> list[Any]:
    """One value of each alternative of a recorded type, as YAML reads it."""
    found: list[Any] = []
    for each in alternatives(kind):
        if each.startswith("list["):
            found += [[value] for value in samples(each[5:-1])]
        elif each != "any":
            found.append(SAMPLES[each] if each in SAMPLES else json.loads(each))
    return found + ([3] if "float" in alternatives(kind) else [])


def has_type(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, member) for member in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is list or hint is list:
        return isinstance(value, list) and all(has_type(each, inner[0]) for each in value if inner)
    return isinstance(value, hint) and not (hint in (int, float) and isinstance(value, bool))


@pytest.mark.parametrize("name", PASSED)
def test_a_field_arrives_as_its_type(name: str) -> None:
    # The types of fields that both have are those of the second.
    record = OptimizerConfig if name in {field.name for field in fields(OptimizerConfig)} else MLATransformerConfig
    for value in samples(PASSED[name]):
        assert fits(value, PASSED[name])
        passed = field_values(record, {name: value, "no_such_field": 1})
        assert list(passed) == [name] and has_type(passed[name], HINTS[name]), (value, passed)


def test_members_of_enums_are_given_by_name() -> None:
    assert field_values(MLATransformerConfig, {"attention_backend": "flash"})["attention_backend"] is AttnBackend.flash
    named = {name for name, hint in HINTS.items() if isinstance(hint, type) and issubclass(hint, enum.Enum)}
    assert named == {"attention_backend"}
    assert all(fits(member.name, PASSED["attention_backend"]) for member in AttnBackend)
    assert not fits(1, PASSED["attention_backend"])
