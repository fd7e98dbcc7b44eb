"""Prompts with images, from rows to tokens."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, EngineKind, ModelBuild, OnBadRow, RolloutConfig
from rlscale.data.prompts import SftTarget, load_prompts
from rlscale.errors import DataError
from rlscale.images import to_data_url
from rlscale.models.hf_models import load_tokenizer
from rlscale.models.image_positions import place_images
from rlscale.models.image_processor import load_image_processor
from rlscale.rollout.sft import labelled_group
from rlscale.types import Prompt
from tests.tiny_vision import draw, write_tiny_vision

Write = Callable[..., str]
PICTURE = draw(16, 16)  # 4 x 4 patches, 4 tokens
URL = to_data_url(PICTURE)


@pytest.fixture(scope="module")
def vision_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path_factory.mktemp("models")))


@pytest.fixture
def load(vision_tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[Prompt]]:
    def load(path: str, *, limit: int | None = None, **settings: Any) -> list[Prompt]:
        data = DataConfig(prompt_data=path, apply_chat_template=True, multimodal_keys={"image": "images"}, **settings)
        rollout = RolloutConfig(engine=EngineKind.embedded, max_prompt_len=limit)
        return load_prompts(data, rollout, vision_tokenizer)

    return load


def test_images_come_from_paths_urls_base64_and_bytes(
    load: Callable[..., list[Prompt]], write_jsonl: Write, tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PICTURE)
    (tmp_path / "[1].png").write_bytes(PICTURE)
    sources: list[Any] = [
        "pictures/a.png",
        to_data_url(PICTURE),
        base64.b64encode(PICTURE).decode(),
        {"path": "pictures/a.png"},
    ]
    rows: list[dict[str, Any]] = [{"input": "<image>how many?", "images": [source]} for source in sources]
    rows += [{"input": "<image>how many?", "images": text} for text in ("[1].png", '["pictures/a.png"]')]
    prompts = load(write_jsonl(*rows))
    parquet.write_table(
        pyarrow.table({"input": ["<image>how many?"], "images": [[{"bytes": PICTURE, "path": None}]]}),
        tmp_path / "rows.parquet",
    )
    prompts += load(str(tmp_path / "rows.parquet"))
    assert len(prompts) == 7
    assert {prompt.images[0].digest for prompt in prompts} == {prompts[0].images[0].digest}
    assert {prompt.token_ids for prompt in prompts} == {prompts[0].token_ids}
    assert prompts[0].token_ids.count(107) == 4
    assert prompts[0].images[0].read() == PICTURE
    assert prompts[0].text == "<|user|><|vision_start|><|image_pad|><|vision_end|>how many?<|assistant|>"


def test_several_images_keep_their_order_in_messages(load: Callable[..., list[Prompt]], write_jsonl: Write) -> None:
    wide, small = to_data_url(draw(32, 16)), to_data_url(PICTURE)
    messages = [
        {"role": "system", "content": "compare"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and <image>"}]},
    ]
    (prompt,) = load(write_jsonl({"input": messages, "images": [wide, small]}))
    assert [image.grid for image in prompt.images] == [(1, 4, 8), (1, 4, 4)]
    assert prompt.token_ids.count(107) == 8 + 4


def test_the_length_filter_counts_the_tokens_of_images(load: Callable[..., list[Prompt]], write_jsonl: Write) -> None:
    # Both have 6 tokens of text and markers; the images have 16 and 4.
    rows = [
        {"input": "<image>?", "images": to_data_url(draw(32, 32))},
        {"input": "<image>?", "images": to_data_url(PICTURE)},
    ]
    path = write_jsonl(*rows)
    assert [len(prompt.token_ids) for prompt in load(path)] == [21, 9]
    assert [prompt.index for prompt in load(path, limit=20)] == [1]


def test_a_conversation_has_images_in_later_turns(
    vision_tokenizer: PreTrainedTokenizerBase, write_jsonl: Write
) -> None:
    talk = [
        {"role": "user", "content": "<image>how many?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "3"},
    ]
    path = write_jsonl({"input": talk, "images": [to_data_url(draw(32, 16)), URL]})
    data = DataConfig(prompt_data=path, apply_chat_template=True, multimodal_keys={"image": "images"})
    rollout = RolloutConfig(engine=EngineKind.embedded)
    (prompt,) = load_prompts(data, rollout, vision_tokenizer, sft_target=SftTarget.conversations)
    (sample,) = labelled_group(0, prompt, vision_tokenizer, version=0).samples
    assert prompt.token_ids.count(107) == 8 and sample.tokens.tolist().count(107) == 8 + 4
    assert sample.images == prompt.images and len(sample.images) == 2
    layout = load_image_processor(vision_tokenizer.name_or_path).layout
    places = place_images(layout, sample.tokens, [image.grid for image in sample.images])
    # No image token is learned; the answers are.
    learned = vision_tokenizer.decode(sample.tokens[sample.prompt_len :][sample.loss_mask == 1])
    assert places[1] > sample.prompt_len and learned == "2<|eos|>3<|eos|>"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"input": "<image>?", "images": ["missing.png"]}, "have an image as image 1 under 'images'; .*must be a file"),
        (
            {"input": "?", "images": [to_data_url(PICTURE)]},
            "have one <image> in its messages for each of its 1 images, got 0",
        ),
        ({"input": "<image>?"}, "each of its 0 images, got 1"),
        ({"input": "<image>?", "images": "[broken"}, "have an image as image 1 under 'images'; .*must be a file"),
        ({"input": "<image>?", "images": ["http://x/y.png"]}, "must be on this machine"),
        (
            {"input": "<image><|image_pad|>", "images": [to_data_url(PICTURE)]},
            "one placeholder for each of its 1 images, got 2",
        ),
        ({"input": "<image>?", "images": [to_data_url(PICTURE[:60])]}, "complete file that Pillow reads"),
    ],
)
def test_a_row_with_bad_images_is_named(
    row: dict[str, Any], rule: str, load: Callable[..., list[Prompt]], write_jsonl: Write
) -> None:
    good = {"input": "<image>?", "images": [to_data_url(PICTURE)]}
    path = write_jsonl(good, row)
    with pytest.raises(DataError, match=f"rows.jsonl row 2 must .*{rule}"):
        load(path)
    assert [prompt.index for prompt in load(path, on_bad_row=OnBadRow.skip)] == [0]
