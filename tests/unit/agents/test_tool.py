"""Tools: the schema of a signature, wrong arguments for the policy, wrong functions for the user."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from rlscale.agents import Tool, ToolError, tool
from rlscale.agents.tool import ToolDefinitionError, cut_text, result_text


class Unit(StrEnum):
    km = "km"
    mile = "mile"


@tool
def convert(
    value: float, unit: Unit, *, digits: Annotated[int, Field(ge=0, le=9)] = 2, tags: list[str] | None = None
) -> str:
    """Converts a length.

    It rounds the result.

    Args:
        value: the length
            in meters.
        unit: the unit of the result.
        digits: after the point.

    Returns:
        The length with its unit.
    """
    return f"{round(value / {'km': 1000, 'mile': 1609.344}[unit], digits)} {unit}"


def test_a_signature_and_its_docstring_are_the_schema() -> None:
    assert convert.spec == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts a length. It rounds the result.",
            "parameters": {
                "$defs": {"Unit": {"enum": ["km", "mile"], "type": "string"}},
                "additionalProperties": False,
                "properties": {
                    "value": {"description": "the length in meters.", "type": "number"},
                    "unit": {"$ref": "#/$defs/Unit", "description": "the unit of the result."},
                    "digits": {
                        "default": 2,
                        "description": "after the point.",
                        "maximum": 9,
                        "minimum": 0,
                        "type": "integer",
                    },
                    "tags": {
                        "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["value", "unit"],
                "type": "object",
            },
        },
    }


def test_a_tool_is_the_function_that_it_was() -> None:
    assert convert(1500.0, Unit.km) == "1.5 km"
    assert (convert.name, convert.is_async) == ("convert", False)


def test_parameters_without_arguments_are_an_empty_object() -> None:
    @tool(name="now", description="The time.")
    def clock() -> int:
        return 7

    assert clock.spec["function"] == {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert clock.run("") == clock.run("{}") == 7


def test_a_parameter_may_have_any_name_that_json_has() -> None:
    @tool
    def find(title: str, model_name: str = "", description: str = "") -> str:
        return title + model_name

    assert list(find.spec["function"]["parameters"]["properties"]) == ["title", "model_name", "description"]
    assert find.run('{"title": "a", "model_name": "b"}') == "ab"


def test_arguments_are_checked_and_converted() -> None:
    assert convert.run('{"value": "3218.688", "unit": "mile", "digits": 1}') == "2.0 mile"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{'value': 1}", "the arguments of convert must be a JSON object; Invalid JSON: key must be a string"),
        ("7", "wrong arguments of convert: arguments: Input should be an object"),
        ('{"unit": "km"}', "wrong arguments of convert: value: Field required"),
        ('{"value": 1, "unit": "inch"}', "wrong arguments of convert: unit: Input should be 'km' or 'mile'"),
        ('{"value": 1, "unit": "km", "depth": 2}', "wrong arguments of convert: depth: Extra inputs are not permitted"),
        ('{"value": [], "unit": "km", "digits": 99}', "wrong arguments of convert: value: Input should be a valid"),
        ("[" * 100_000, "the arguments of convert must be a JSON object; Invalid JSON: recursion limit"),
        ("\x00", "the arguments of convert must be a JSON object"),
    ],
)
def test_wrong_arguments_are_explained_to_the_policy(arguments: str, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        convert.run(arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def no_type(a) -> int:  # type: ignore[no-untyped-def]
    return 0


def variable(*values: int) -> int:
    return 0


def positional(a: int, /) -> int:
    return 0


def unknown(a: "Missing") -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


def of_object(a: ToolDefinitionError) -> int:
    return 0


def of_function(a: Any, b: Literal["x"], _c: int = 0) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_type, "must have a type for every parameter, got a without one"),
        (variable, "must take each argument by name, got the parameter *values: int"),
        (positional, "must take each argument by name, got the parameter a: int"),
        (unknown, "must have types that can be found, got name 'Missing' is not defined"),
        (of_object, "must have parameters with types of JSON, such as int, str or list[str], got Unable to generate"),
        (of_function, "must have parameters with types of JSON, such as int, str or list[str], got Fields must not"),
        (lambda: 0, "must have a name of letters, digits, _ and -, got '<lambda>'"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ToolDefinitionError) as caught:
        assert Tool(function).spec
    assert str(caught.value).startswith(message)


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (None, ""),
        (True, "true"),
        ({"a": [1, 2.5]}, '{"a":[1,2.5]}'),
        (Point(1), '{"x":1}'),
        (float("nan"), "NaN"),
        (ValueError("x"), '"x"'),
        ("é", "é"),
    ],
)
def test_a_result_is_text(value: Any, text: str) -> None:
    assert result_text(value) == text


def test_a_long_result_is_cut() -> None:
    assert cut_text("abcdef", 6) == "abcdef"
    assert cut_text("abcdefg", 6) == "abcdef\n[1 more characters are cut off]"


def test_a_lone_surrogate_of_a_result_is_replaced() -> None:
    assert cut_text("a\ud83d\udcffb", 6) == "a??b"
