"""Contents with images of tools and environments, and their files in the logs of environments."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcp.types import ImageContent, TextContent
from PIL import Image as PillowImage

from rlscale.agents.content_parts import image_contents
from rlscale.agents.environment import Action, Task
from rlscale.agents.environment_child import message_values
from rlscale.agents.environment_log import EnvironmentLog, Episode, read_episodes
from rlscale.agents.environment_replay import ReplayedEnvironment
from rlscale.agents.mcp_tools import McpTools
from rlscale.config.groups.agent import AgentConfig
from rlscale.images import Image, digest_of, map_images, read_uri, to_data_url
from rlscale.renderers.run_images import task_messages
from rlscale.types import Prompt
from tests.tiny_vision import draw

PNG = draw(8, 8)
URL = to_data_url(PNG)


def parts(value: Any) -> Any:
    return image_contents(value, cut=lambda text: text[:5])


def test_a_value_with_an_image_becomes_parts_with_data_urls(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    image = {"type": "image", "image": URL}
    for given in (PNG, str(tmp_path / "a.png"), tmp_path / "a.png", URL):
        assert parts({"type": "image", "image": given}) == [image]
    assert parts(["long text", {"type": "image_url", "image_url": {"url": URL}}]) == [
        {"type": "text", "text": "long "},
        image,
    ]
    assert parts([{"type": "text", "text": "a"}, {"type": "image", "image": PNG}, "b"]) == [
        {"type": "text", "text": "a"},
        image,
        {"type": "text", "text": "b"},
    ]
    # Values without an image stay what they were: text or JSON.
    for text in ("x", 3, None, [1, 2], {"sum": 3}, [{"type": "text", "text": "a"}], PNG, []):
        assert parts(text) is None


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK"])
def test_a_pil_image_of_any_mode_becomes_a_png(mode: str) -> None:
    (part,) = parts(PillowImage.new(mode, (6, 4)))
    with PillowImage.open(io.BytesIO(read_uri(part["image"]))) as opened:
        assert opened.size == (6, 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "image"}, "must be a PIL image, bytes, a path or a data URL, got NoneType"),
        ({"type": "image", "image": "https://a/b.png"}, "must be on this machine, got https://a/b.png"),
        ([{"type": "image", "image": URL}, 3], "must have texts and images only, got 'int'"),
        ([{"type": "image", "image": URL}, {"type": "video"}], "must have texts and images only, got 'video'"),
    ],
)
def test_what_is_no_image_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts(value)


def test_messages_of_an_environment_keep_their_images() -> None:
    given = [{"role": "user", "content": ["look closely", {"type": "image", "image": PNG}]}]
    content = [{"type": "text", "text": "look \n[7 more characters are cut off]"}, {"type": "image", "image": URL}]
    assert message_values(given, max_chars=5) == [{"role": "user", "content": content}]
    assert message_values("hi", max_chars=5) == [{"role": "user", "content": "hi"}]


def test_images_of_an_mcp_server_are_parts_if_the_run_reads_them() -> None:
    found = SimpleNamespace(
        content=[
            TextContent(type="text", text="a" * 90),
            ImageContent(type="image", data=base64.b64encode(PNG).decode(), mimeType="image/png"),
        ]
    )
    tools = McpTools("server", [], AgentConfig(mcp_servers=["server"], max_tool_chars=4), reads_images=True)
    text, image = tools._parts(found)
    assert text["text"].startswith("aaaa\n") and image == {"type": "image", "image": URL}
    found.content.pop()
    assert tools._parts(found) == ()


def image_of(content: bytes) -> Image:
    return Image(uri=to_data_url(content), digest=digest_of(content), grid=(1, 4, 4), token=7, num_tokens=4)


def test_an_environment_gets_the_images_of_its_row() -> None:
    messages = ({"role": "user", "content": "<image>How many?"}, {"role": "user", "content": "now"})
    prompt = Prompt(index=0, text="", token_ids=(1,), messages=messages, images=(image_of(PNG),))
    first, second = task_messages(prompt)
    assert first["content"] == [{"type": "image", "image": URL}, {"type": "text", "text": "How many?"}]
    assert second["content"] == "now"


def test_a_log_has_each_image_once_as_a_file_which_a_replay_returns(tmp_path: Path) -> None:
    def episode(number: int) -> Episode:
        picture = image_of(draw(8, 8, seed=number))
        message = {"role": "user", "content": [{"type": "image", "image": picture.digest}]}
        task = Task(index=number, messages=({"role": "user", "content": [{"type": "image", "image": URL}]},), seed=1)
        made = Episode(trajectory=number, task=task, end="done")
        made.add_start({"messages": [message], "tools": []}, [picture])
        result = {"messages": [message], "reward": None, "done": False, "metadata": {}}
        made.add_step(Action(text="up"), result, 0.1, images=[picture])
        return made

    log = EnvironmentLog(tmp_path, keep=1)
    for number in range(3):
        log.write(episode(number))
    assert "base64" not in (tmp_path / "2.jsonl").read_text()
    # Files of episodes that are no longer kept are removed.
    assert sorted(each.name for each in tmp_path.glob("*.images")) == ["1.images", "2.images"]
    (picture,) = (tmp_path / "2.images").iterdir()
    assert picture.suffix == ".png" and picture.read_bytes() == draw(8, 8, seed=2)
    replay = ReplayedEnvironment({"environment_log": str(tmp_path)}, trajectory=2)
    start = replay.reset()
    assert start.messages == [{"role": "user", "content": [{"type": "image", "image": str(picture)}]}]
    assert replay.step(Action(text="up")).messages == start.messages
    assert message_values(start.messages, max_chars=9)[0]["content"][0]["image"] == to_data_url(picture.read_bytes())
    assert len(read_episodes(tmp_path)) == 2


def test_parts_of_other_types_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]
    assert map_images(messages, str.upper) == messages
