"""Tools that take the images of their row: the schema without them, numbers of images, the example of the docs."""

from pathlib import Path
from typing import Annotated, Any, cast

import pytest
from PIL.Image import Image

from rlscale.agents import Tool, ToolError, tool
from rlscale.agents.check_agent_process import check
from rlscale.agents.image_parameters import ImageCount, find_wrong_row, open_pictures
from rlscale.agents.load_tools import check_tool_images
from rlscale.agents.tool import ToolDefinitionError
from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_child import ToolCalls, ToolsSpec
from rlscale.agents.tool_pool import Owner, ToolBox, ToolResult
from rlscale.config.groups.agent import AgentConfig
from rlscale.driver.preflight.agent_checks import check_agent
from rlscale.images import Image as RowImage
from rlscale.images import digest_of, to_data_url
from rlscale.testing import ContractError, check_tool
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt
from tests.scripted_vision import VisionPool, open_vision_model, vision_session
from tests.tiny_vision import draw
from tests.unit.config.rules.valid_config import config_with

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "vision.md"


@tool
def size(figure: Image, scale: int = 1) -> str:
    """Measures the figure."""
    return f"{figure.width * scale}x{figure.height * scale} {figure.mode}"


@tool
def count(figures: Annotated[list[Image], "all"], first: Image | None = None) -> int:
    return len(figures) + 10 * (first is not None)


def image(width: int, height: int, seed: int = 0) -> RowImage:
    content = draw(width, height, seed=seed)
    return RowImage(uri=to_data_url(content), digest=digest_of(content), grid=(1, 2, 2), token=7, num_tokens=1)


def prompt(index: int, *images: RowImage) -> Prompt:
    return Prompt(index=index, text="", token_ids=(1,), images=images)


def test_the_policy_sees_no_parameter_that_takes_an_image() -> None:
    assert list(size.spec["function"]["parameters"]["properties"]) == ["scale"]
    assert count.spec["function"]["parameters"]["properties"] == {}
    assert size.image_parameters == {"figure": ImageCount.one}
    assert count.image_parameters == {"figures": ImageCount.any, "first": ImageCount.one_or_none}
    # Nor can it set one.
    with pytest.raises(ToolError, match="figure: Extra inputs are not permitted"):
        size.parse('{"figure": "a.png"}')
    with pytest.raises(ToolDefinitionError, match="types of JSON"):
        assert tool(by_name).spec


def by_name(figures: dict[str, Image]) -> int:
    return len(figures)


def test_a_function_gets_the_images_of_the_row_in_rgb() -> None:
    pictures = open_pictures([image(24, 16)])
    assert size.run('{"scale": 2}', pictures) == "48x32 RGB"
    assert [count.run("", pictures[:number]) for number in (0, 1)] == [0, 11]
    with pytest.raises(ValueError, match="the parameter figure takes one of the row's images, got 0"):
        size.run("{}")
    with pytest.raises(ValueError, match="first takes one or none of the row's images, got 2"):
        count.run("{}", [*pictures, *pictures])
    assert size(pictures[0]) == "24x16 RGB"


def test_a_row_without_the_image_is_named() -> None:
    rows = [prompt(0, image(24, 16)), prompt(4)]
    assert find_wrong_row(rows, {"count": count.image_parameters}, source="a.jsonl") is None
    assert find_wrong_row(rows[:1], {"size": size.image_parameters}, source="a.jsonl") is None
    assert find_wrong_row(rows, {"size": size.image_parameters}, source="a.jsonl") == (
        "a.jsonl row 5 must have one image for the tool size, got 0; remove the row, or annotate the parameter with "
        "list[Image] or Image | None"
    )


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Module with the example of the page."""
    (tmp_path / "tools_with_images.py").write_text(_example())
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tools_with_images"


def test_a_run_that_reads_no_images_is_refused(example: str) -> None:
    (problem,) = check_tool_images([size, tool(lambda: 1, name="now")], reads_images=False)  # type: ignore[call-overload]
    assert str(problem) == (
        "data.multimodal_keys must be set with tools that take images of the row (size), got null; set it to the field "
        "of the rows that has them, e.g. data.multimodal_keys={image: images}"
    )
    assert check_tool_images([size], reads_images=True) == []
    settings: dict[str, Any] = {"agent.tools": [f"{example}:zoom"]}
    assert [each.path for each in check_agent(config_with(settings))] == ["data.multimodal_keys"]
    assert check_agent(config_with(settings | {"data.multimodal_keys": {"image": "images"}})) == []


def _example() -> str:
    (block,) = [each.split("```")[0] for each in PAGE.read_text().split("```python\n") if "def zoom" in each]
    return block


def test_the_example_of_the_page_enlarges_a_part() -> None:
    scope: dict[str, Any] = {}
    exec(_example(), scope)
    zoom = cast(Tool, scope["zoom"])
    part = {"left": 0.5, "top": 0.25, "right": 1, "bottom": 0.5}
    assert check_tool(zoom, part) == "[image 448x168]"
    assert check_tool(zoom) == "Error: left must be below right, and top below bottom"
    picture = zoom.run('{"left": 0.5, "top": 0, "right": 1, "bottom": 1}', open_pictures([image(64, 32)]))
    own = open_pictures([image(64, 32)])[0].crop((32, 0, 64, 32)).resize((448, 448))
    assert picture.tobytes() == own.tobytes()


def test_a_process_opens_the_images_of_a_call(example: str) -> None:
    calls = ToolCalls(ToolsSpec(paths=(f"{example}:zoom",), is_async=False, max_chars=100))
    arguments = '{"left": 0, "top": 0, "right": 1, "bottom": 1}'
    call = calls.open(("zoom", arguments, (image(64, 32),)))
    (part,) = call.reply(call.run())["parts"]
    assert part["image"].startswith("data:image/png;base64,")
    with pytest.raises(ValueError, match="the parameter figure takes one of the row's images, got 0"):
        calls.open(("zoom", arguments, ())).run()


def test_the_check_of_plug_ins_names_the_parameter(example: str) -> None:
    lines = check(f"{example}:zoom", "tool", config_with({}))
    assert lines == [
        "zoom(left, top, right, bottom): Shows a part of the figure, enlarged. All sides are from 0 to 1.",
        "zoom gets one of the row's images as figure; the policy does not see this parameter",
        "returned: zoom: 'Error: left must be below right, and top below bottom'",
    ]


def test_a_result_that_cannot_be_an_image_is_a_breach() -> None:
    @tool
    def far(figure: Image) -> Any:
        return ["here:", {"type": "image", "image": "http://a/b.png"}]

    with pytest.raises(ContractError, match="return texts, images or JSON values: an image must be on this mach"):
        check_tool(far)


class OpenedTools:
    """Calls functions in this process, with their images as a process gets them."""

    keeps_state = False

    def __init__(self, *tools: Tool) -> None:
        self.specs = [each.spec for each in tools]
        self._tools = {each.name: each for each in tools}

    async def call(self, name: str, arguments: str, owner: Owner, *, images: Any = ()) -> ToolResult:
        return ToolResult(text=str(self._tools[name].run(arguments, open_pictures(images))))

    async def release(self, owner: Owner) -> None: ...

    async def close(self, *, wait: bool) -> None: ...


async def test_every_turn_has_the_images_of_the_row(tmp_path: Path) -> None:
    model, config = open_vision_model(tmp_path), AgentConfig(tools=["a:b"], tool_retries=0)
    row, pool = model.prompt(draw(24, 16)), VisionPool(model.tokenizer, ("<|call|>size{}", "<|call|>size{}", "done"))
    trajectory = Trajectory(id=0, group_index=0, prompt=row, seed=0)
    box = ToolBox([OpenedTools(size)], config, images=model.images)
    agent = ToolAgent(box, model.renderer, config, images=model.images)
    assert await agent(trajectory, vision_session(pool, row)) is None
    results = [turn for turn in trajectory.turns if not turn.sampled]
    assert [model.tokenizer.decode(turn.token_ids).count("24x16 RGB") for turn in results] == [1, 1]
