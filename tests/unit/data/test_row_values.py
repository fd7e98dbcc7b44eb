"""Values of rows: labels, metadata, tools, messages, and the fields of other libraries' files."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, OnBadRow, RolloutConfig
from rlscale.data.prompts import FilePromptSource, load_prompts
from rlscale.errors import DataError
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.types import Prompt

Write = Callable[..., str]

CHAT = {"apply_chat_template": True}


def load(path: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Prompt]:
    return load_prompts(DataConfig(prompt_data=path, **settings), RolloutConfig(), tokenizer)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (True, "true"),
        (2.0, "2.0"),
        (2, "2"),
        ("a", "a"),
        ("", ""),
        (["a", 1], '["a", 1]'),
        ({"x": None}, '{"x": null}'),
    ],
)
def test_a_label_is_any_json_value(
    label: Any, text: str, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    (prompt,) = load(write_jsonl({"input": "1", "label": label}), tokenizer, label_key="label")
    assert prompt.label == label and type(prompt.label) is type(label)
    assert prompt.label_text == text


def test_metadata_of_parquet_are_values_of_json(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    about = {
        "made": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "took": timedelta(seconds=1.5),
        "points": [Decimal("2.50"), Decimal("3.00")],
    }
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"input": "1", "metadata": about}]), file)
    (prompt,) = load(str(file), tokenizer)
    assert prompt.metadata == {
        "made": "2026-01-02T03:04:00+00:00",
        "day": "2026-01-02",
        "took": 1.5,
        "points": [2.5, 3],
    }
    parquet.write_table(pyarrow.Table.from_pylist([{"input": "1", "metadata": {"picture": b"PNG"}}]), file)
    with pytest.raises(
        DataError, match=r"row 1 must have JSON values as metadata, got bytes under 'metadata\.picture'"
    ):
        load(str(file), tokenizer)


def test_a_row_of_verl(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": json.dumps({"index": 0}),
    }
    others = [row | {"data_source": name} for name in ("aime24", "unknown")]
    own = row | {"extra_info": {"rm_type": "f1"}}
    found = load(
        write_jsonl(row, *others, own),
        tokenizer,
        input_key="prompt",
        label_key="reward_model.ground_truth",
        metadata_key="extra_info",
        reward_by_source={"openai/gsm8k": "math", "aime*": "dapo"},
        **CHAT,
    )
    assert {prompt.label for prompt in found} == {"2"}
    assert found[0].metadata == {"index": 0, "data_source": "openai/gsm8k", "rm_type": "math"}
    assert [prompt.metadata.get("rm_type") for prompt in found[1:]] == ["dapo", None, "f1"]
    # A field with a dot in its name is found first.
    (prompt,) = load(write_jsonl({"a.b": "1", "a": {"b": "2"}}), tokenizer, input_key="a.b")
    assert prompt.text == "1"


def test_the_source_of_a_row_is_in_the_field_that_the_key_names(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"input": "1+1=", "origin": {"name": name}, "data_source": "b"} for name in ("a", "c")]
    found = load(write_jsonl(*rows), tokenizer, source_key="origin.name", reward_by_source={"a": "math", "b": "f1"})
    assert [prompt.metadata.get("rm_type") for prompt in found] == ["math", None]
    assert [prompt.metadata["origin.name"] for prompt in found] == ["a", "c"]


def test_content_parts_are_joined(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "1+"}, "1", {"text": "="}]
    (prompt,) = load(write_jsonl({"input": [{"role": "user", "content": parts}]}), tokenizer, **CHAT)
    assert prompt.text == "<|user|>1+1=<|assistant|>"


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_reach_template_and_metadata(as_text: bool, write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
    )
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    rows = [
        {"input": "1", "tools": json.dumps(tools) if as_text else tools},
        {"input": "2"},
        {"input": "3", "tools": None},
    ]
    found = load(write_jsonl(*rows), tokenizer, tool_key="tools", **CHAT)
    assert [prompt.text for prompt in found] == ["add;1", "2", "3"]
    assert found[0].metadata == {"tools": tools} and found[1].metadata == {}
    with pytest.raises(DataError, match="row 1 must have a list of tool schemas under 'tools', or one as JSON text"):
        load(write_jsonl({"input": "1", "tools": {"a": 1}}), tokenizer, tool_key="tools", **CHAT)


def message(role: str, content: Any = "1", **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


ODD = [
    (
        [message("human")],
        "with a role among system, developer, user, assistant, tool, function under 'input', got 'human'",
    ),
    (
        [message("user"), message("assistant")],
        "end with a message to answer, got one of the assistant; remove it, or set",
    ),
    ([message("system")], "have a message of the user, got only system messages"),
    ([message("user", " ")], "have a prompt of at least one token, got an empty last message"),
    (
        [message("user", [{"type": "image", "image": "a"}])],
        "got a part of type 'image'; images need data.multimodal_keys",
    ),
    ([message("user", None)], "text parts as content of message 1 under 'input', got null"),
    ([message("user", {"text": "a"}), message("user", 7)], "as content of message 2 under 'input', got integer"),
    ("", "have a prompt of at least one token under 'input', got ''"),
]


@pytest.mark.parametrize(("value", "text"), ODD)
def test_odd_prompts_are_reported(
    value: Any, text: str, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl({"input": "1"}, {"input": value})
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **CHAT)
    assert f"{path} row 2 must " in str(caught.value) and text in str(caught.value)


def test_a_last_answer_may_be_continued(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    path = write_jsonl({"input": [message("user"), message("assistant", "2")]})
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    (prompt,) = load(path, tokenizer, apply_chat_template_kwargs=arguments, **CHAT)
    assert prompt.text.endswith("2")


def test_bad_rows_are_skipped_and_counted(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [{"input": value} for value, _ in ODD]
    path = write_jsonl({"input": "1"}, *odd, "{", {"other": 1}, {"input": "\u00e9"}, {"input": "2"})
    settings = DataConfig(prompt_data=path, on_bad_row=OnBadRow.skip, **CHAT)
    with caplog.at_level(logging.WARNING):
        source = FilePromptSource(settings, RolloutConfig(), tokenizer)
    assert [prompt.index for prompt in source.take(3)] == [0, 12, 0] and len(source) == 2
    assert source.num_dropped["empty prompt"] == 2 and sum(source.num_dropped.values()) == 11
    assert f"11 of 13 rows of {path} were skipped with data.on_bad_row=skip: 3 content is no text, " in caplog.text
    assert f"the first one: {path} row 2 must have messages with a role among" in caplog.text
    with pytest.raises(
        DataError, match="must have at least one usable prompt, got none; all 1 were dropped: 1 no field"
    ):
        FilePromptSource(
            DataConfig(prompt_data=write_jsonl({"a": 1}), on_bad_row=OnBadRow.skip), RolloutConfig(), tokenizer
        )
