"""Contracts of tools and environments, as a test of the user runs them."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from rlscale.agents import StepResult, ToolError, tool
from rlscale.agents.agent_contracts import example_arguments
from rlscale.testing import ContractError, check_environment, check_tool


class Kind(StrEnum):
    a = "a"


class Place(BaseModel):
    name: str
    floor: int | None


@tool
def everything(
    n: Annotated[int, Field(ge=3)], x: float, t: str, k: Kind, c: Literal["b"], p: Place, s: list[int], d: int = 4
) -> dict[str, Any]:
    return {"n": n, "t": t, "p": p}


def test_examples_fit_any_schema() -> None:
    assert check_tool(everything) == '{"n":3,"t":"text","p":{"name":"text","floor":1}}'
    assert example_arguments(everything.spec["function"]["parameters"])["s"] == []


def test_a_tool_is_called_with_your_arguments() -> None:
    @tool
    async def half(n: int) -> float:
        if n % 2:
            raise ToolError("n must be even")
        return n / 2

    assert check_tool(half, {"n": 6}) == "3.0"
    assert check_tool(half) == "Error: n must be even"


class Count:
    def __init__(self) -> None:
        self.number, self.num_closed = 0, 0

    def reset(self, task: Any) -> Any:
        return task.messages

    async def step(self, action: Any) -> Any:
        self.number += 1
        return StepResult(messages="on", reward=0.5, done=self.number == 2)

    def close(self) -> None:
        self.num_closed += 1


def test_an_environment_is_played_and_closed() -> None:
    game = Count()
    assert [each.done for each in check_environment(lambda: game)] == [False, True]
    assert game.num_closed == 1


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("reset", lambda task: None, "must have a method reset that returns messages:"),
        ("reset", lambda task: [], "must have a method reset that returns messages, got no message"),
        ("step", lambda action: 1.0, "must have a method step that returns a StepResult: step must return"),
        ("step", lambda action: StepResult(), "must have a method step that returns a StepResult: a step that is"),
        ("step", None, "must have a method step, got an object of type Count without it"),
    ],
)
def test_a_wrong_environment_is_explained(name: str, found: Any, message: str) -> None:
    game = Count()
    setattr(game, name, found)
    with pytest.raises(ContractError) as caught:
        check_environment(lambda: game)
    assert str(caught.value).startswith(message)
