"""The environment of geometry problems: checks of answers, parts of figures, and wrong calls."""

import io
from typing import Any

import pytest
from PIL import Image

from rlscale.agents import Action, Task
from rlscale.agents.content_parts import image_contents
from rlscale.examples.geometry import MIN_SIDE, Geometry
from rlscale.images import read_uri, to_data_url
from rlscale.renderers.renderer import ToolCall
from tests.tiny_vision import draw

FIGURE = {"type": "image", "image": to_data_url(draw(40, 20))}
MESSAGES = ({"role": "user", "content": [FIGURE, {"type": "text", "text": "Find x."}]},)


@pytest.fixture
def game() -> Geometry:
    geometry = Geometry()
    start = geometry.reset(Task(index=0, messages=MESSAGES, label="2 \\sqrt { 3 }"))
    assert start.messages == MESSAGES
    assert [tool["function"]["name"] for tool in start.tools] == ["check", "zoom"]
    return geometry


def call(game: Geometry, name: str, arguments: str) -> Any:
    result = game.step(Action(text="", tool_calls=(ToolCall(name=name, arguments=arguments, id="c"),)))
    assert not result.done and result.reward is None
    (message,) = result.messages
    assert isinstance(message, dict) and (message["role"], message["tool_call_id"]) == ("tool", "c")
    return message["content"]


def test_an_answer_without_a_call_is_graded_by_the_run(game: Geometry) -> None:
    result = game.step(Action(text=r"\boxed{3}"))
    assert result.done and result.reward is None


def test_an_answer_is_checked_as_mathematics(game: Geometry) -> None:
    assert call(game, "check", '{"answer": "\\\\sqrt{12}"}') == "right"
    assert call(game, "check", '{"answer": "3"}') == "wrong"


def test_a_part_of_the_figure_is_an_image(game: Geometry) -> None:
    content = call(game, "zoom", '{"left": 0, "top": 0, "right": 0.5, "bottom": 1}')
    parts = image_contents(content, cut=str)
    assert parts is not None
    with Image.open(io.BytesIO(read_uri(parts[0]["image"]))) as part:
        assert part.size == (MIN_SIDE, MIN_SIDE)
    strip = image_contents(call(game, "zoom", '{"left": 0, "top": 0, "right": 1, "bottom": 0.1}'), cut=str)
    assert strip is not None
    with Image.open(io.BytesIO(read_uri(strip[0]["image"]))) as part:
        assert part.size == (2 * MIN_SIDE, MIN_SIDE)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("zoom", '{"left": 1, "top": 0, "right": 0.5, "bottom": 1}', "sides must be from 0 to 1"),
        ("zoom", '{"left": 0}', "KeyError"),
        ("check", "[", "JSONDecodeError"),
        ("check", "3", "TypeError"),
        ("draw", "{}", "there is no tool 'draw'"),
    ],
)
def test_a_wrong_call_is_a_result(game: Geometry, name: str, arguments: str, message: str) -> None:
    assert message in call(game, name, arguments)


def test_a_call_that_cannot_be_read_is_named(game: Geometry) -> None:
    result = game.step(Action(text="x", error="it has no name"))
    assert not result.done and "it has no name" in str(result.messages)
