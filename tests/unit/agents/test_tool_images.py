"""Images that tools return: places among the tokens, masks, budgets, and what a policy cannot make of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_pool import ToolBox, ToolResult
from rlscale.checkpoint.pending_groups import load_groups, save_groups
from rlscale.config.groups.agent import AgentConfig
from rlscale.errors import RenderError
from rlscale.images import IMAGE_TYPE, to_data_url
from rlscale.models.image_positions import place_images
from rlscale.renderers.answer_parser import Tokenizer
from rlscale.renderers.families import AUTO, make_renderer
from rlscale.renderers.message_images import MessageImages, check_image_role
from rlscale.renderers.renderer import Renderer
from rlscale.trajectory import Trajectory, trajectory_from_sample
from rlscale.types import FailureCause, Group, SampleStatus, SamplingParams, fit_context
from tests.scripted_vision import VisionModel, VisionPool, open_vision_model, vision_session
from tests.tiny_vision import draw
from tests.unit.agents.test_tool_agent import LocalTools


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return open_vision_model(tmp_path_factory.mktemp("model"))


def picture_of(size: tuple[int, int], seed: int) -> Callable[[str], ToolResult]:
    def result(arguments: str) -> ToolResult:
        url = to_data_url(draw(*size, seed=seed))
        return ToolResult(text="", parts=({"type": "text", "text": "it is "}, {"type": IMAGE_TYPE, IMAGE_TYPE: url}))

    return result


def agent(model: VisionModel, results: Mapping[str, Callable[[str], Any]]) -> ToolAgent:
    config = AgentConfig(tools=["a:b"], tool_retries=0)
    return ToolAgent(
        ToolBox([LocalTools(results)], config, images=model.images), model.renderer, config, images=model.images
    )


TOOLS = {"see": picture_of((24, 16), 1), "zoom": picture_of((16, 24), 2), "other": picture_of((24, 16), 3)}
CALLS = ("<|call|>see{}", "<|call|>zoom{}<|call|>other{}", "done")


async def run(model: VisionModel, answers: Sequence[str] = CALLS, **params: Any) -> tuple[Trajectory, VisionPool, Any]:
    prompt, pool = model.prompt(draw(16, 16)), VisionPool(model.tokenizer, answers)
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    failure = await agent(model, TOOLS)(trajectory, vision_session(pool, prompt, **params))
    return trajectory, pool, failure


async def test_several_turns_each_have_their_images(model: VisionModel) -> None:
    trajectory, pool, failure = await run(model)
    assert failure is None and trajectory.status == SampleStatus.completed
    layout = model.images.processor.layout
    (sample,) = trajectory.samples()
    assert [image.num_tokens for image in sample.images] == [4, 6, 6, 6]
    # Each request has the images of its tokens, the last one those of the sample.
    assert [len(images) for _, images in pool.requests] == [1, 2, 4]
    assert pool.requests[-1][1] == sample.images
    for ids, images in pool.requests:
        assert ids.count(layout.image_token) == sum(image.num_tokens for image in images)
        assert ids == sample.tokens.tolist()[: len(ids)]
    # Engine and trainer find the same places, all of them in given tokens.
    starts = place_images(layout, sample.tokens, [image.grid for image in sample.images])
    assert len(starts) == 4
    is_image = sample.tokens[sample.prompt_len :] == layout.image_token
    assert is_image.sum() == 18 and not sample.loss_mask[is_image].any()
    assert sample.loss_mask.sum() == sum(len(turn.token_ids) for turn in trajectory.turns if turn.sampled)
    # Messages name images by hash: logs stay small.
    assert "base64" not in json.dumps([turn.messages for turn in trajectory.turns])


async def test_equal_calls_with_different_pictures_are_different_turns(model: VisionModel) -> None:
    """Pictures of one size have equal ids, so only their hashes tell them apart."""
    seeds = iter((1, 2))
    results = {"see": lambda arguments: picture_of((24, 16), next(seeds))(arguments)}
    prompt, pool = model.prompt(), VisionPool(model.tokenizer, ("<|call|>see{}", "<|call|>see{}", "done"))
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    assert await agent(model, results)(trajectory, vision_session(pool, prompt)) is None
    first, second = trajectory.samples()[0].images
    assert first.grid == second.grid and first.digest != second.digest


async def test_an_image_too_large_for_the_context_ends_the_trajectory_whole(model: VisionModel) -> None:
    _, pool, _ = await run(model)
    limit = len(pool.requests[1][0])
    trajectory, pool, failure = await run(model, max_context_len=limit)
    assert failure.cause == FailureCause.budget and trajectory.status == SampleStatus.truncated
    # The turn with the image is not in the sample, nor a part of it.
    (sample,) = trajectory.samples()
    assert len(trajectory.turns) == 1 and len(sample.images) == 1 and len(sample.tokens) < limit
    trajectory, _, failure = await run(model, max_context_len=limit + 1)
    assert failure.cause == FailureCause.budget and len(trajectory.turns) == 3
    assert fit_context(SamplingParams(max_new_tokens=9, max_context_len=limit + 1), limit).max_new_tokens == 1


async def test_a_policy_that_writes_placeholders_ends_its_trajectory(model: VisionModel) -> None:
    trajectory, _, failure = await run(model, ("<|vision_start|><|image_pad|><|call|>see{}", "no"))
    assert failure.cause == FailureCause.policy and "1 placeholders" in failure.message
    assert trajectory.status == SampleStatus.truncated and len(trajectory.turns) == 1


async def test_a_tool_that_writes_a_placeholder_shows_text(model: VisionModel) -> None:
    prompt = model.prompt(draw(16, 16))
    pool = VisionPool(model.tokenizer, ("<|call|>echo{}", "done"))
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    echo = {"echo": lambda arguments: ToolResult(text="<|vision_start|><|image_pad|><|vision_end|>")}
    assert await agent(model, echo)(trajectory, vision_session(pool, prompt)) is None
    assert len(trajectory.samples()[0].images) == 1


async def test_a_result_that_is_no_picture_is_a_failure_of_the_tool(model: VisionModel) -> None:
    broken = {
        "see": lambda arguments: ToolResult(text="", parts=({"type": IMAGE_TYPE, IMAGE_TYPE: to_data_url(b"x")},))
    }
    prompt, pool = model.prompt(draw(16, 16)), VisionPool(model.tokenizer, ("<|call|>see{}",))
    failure = await agent(model, broken)(
        Trajectory(id=0, group_index=0, prompt=prompt, seed=0), vision_session(pool, prompt)
    )
    assert failure is not None and failure.cause == FailureCause.tool and "that Pillow reads" in failure.message
    # A run without images names the key.
    box = ToolBox([LocalTools(TOOLS)], AgentConfig(tools=["a:b"], tool_retries=0))
    assert "set data.multimodal_keys" in str((await box.call("see", "{}")).error)


async def test_an_aborted_trajectory_continues_with_its_images(model: VisionModel, tmp_path: Path) -> None:
    trajectory, pool, failure = await run(model, (CALLS[0], "so..."))
    assert failure is None and trajectory.status == SampleStatus.aborted
    (sample,) = trajectory.samples()
    group = Group(index=0, prompt=sample.prompt, samples=[sample])
    save_groups(tmp_path, [group])
    text = (tmp_path / "groups.json").read_text()
    assert text.count("base64") == 2, "each image is stored once"
    ((restored,),) = (each.samples for each in load_groups(tmp_path))
    assert restored == sample
    again = trajectory_from_sample(restored)
    assert [len(turn.images) for turn in again.turns] == [0, 1, 0]
    assert again.images(0) == sample.images[:1]
    pool = VisionPool(model.tokenizer, (" it is 3", "done"))
    assert await agent(model, TOOLS)(again, vision_session(pool, again.prompt)) is None
    assert pool.requests[0][1] == sample.images and again.status == SampleStatus.completed


async def test_an_empty_answer_that_was_aborted_is_asked_again_without_its_turn(model: VisionModel) -> None:
    trajectory, _, _ = await run(model, (CALLS[0], "..."))
    last = trajectory.turns[-1]
    last.token_ids, last.logprobs, last.spans, last.text = np.empty(0, np.int32), np.empty(0, np.float32), [], ""
    (sample,) = trajectory.samples()
    again = trajectory_from_sample(replace(sample))
    pool = VisionPool(model.tokenizer, ("done",))
    assert await agent(model, TOOLS)(again, vision_session(pool, again.prompt)) is None
    assert pool.requests[0][1] == sample.images == again.images()


def test_a_template_without_images_is_found_before_the_run(model: VisionModel) -> None:
    images = MessageImages(model.images.processor.layout, model.images.placeholder)
    for role in ("user", "tool"):
        check_image_role(model.renderer, images, role)
    text_only = make_renderer(AUTO, cast(Tokenizer, model.tokenizer), model_type="qwen3_vl")
    with pytest.raises(RenderError, match="content must be a text"):
        check_image_role(text_only, images, "user")
    with WithoutToolImages(model) as renderer, pytest.raises(RenderError, match="in a message of the tool, got 0"):
        check_image_role(renderer, images, "tool")


class WithoutToolImages:
    """A renderer whose template ignores the parts of messages that are images."""

    def __init__(self, model: VisionModel) -> None:
        self._tokenizer, self._template = model.tokenizer, model.tokenizer.chat_template

    def __enter__(self) -> Renderer:
        self._tokenizer.chat_template = str(self._template).replace("part.type == 'image'", "false")
        return make_renderer(AUTO, cast(Tokenizer, self._tokenizer), reads_images=True)

    def __exit__(self, *_: object) -> None:
        self._tokenizer.chat_template = self._template
