import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, EngineKind, RolloutConfig
from rlscale.data.prompts import FilePromptSource, load_prompts, prompt_limit
from rlscale.errors import ConfigError, DataError

Write = Callable[..., str]


def config(path: str, **settings: Any) -> DataConfig:
    return DataConfig(prompt_data=path, **settings)


def rollout(engine: EngineKind = EngineKind.embedded, **settings: Any) -> RolloutConfig:
    return RolloutConfig(engine=engine, **settings)


def test_reads_prompt_label_and_metadata(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_jsonl({"q": "1+1=", "a": 2, "about": {"kind": "sum"}}, "", {"q": "2+2=", "a": "4"})
    prompts = load_prompts(config(path, input_key="q", label_key="a", metadata_key="about"), rollout(), tokenizer)
    assert [(p.index, p.text, p.label, p.metadata) for p in prompts] == [
        (0, "1+1=", 2, {"kind": "sum"}),
        (1, "2+2=", "4", {}),
    ]
    assert tokenizer.decode(prompts[0].token_ids) == "1+1="
    # Without a template the text is the message that an agent gets.
    assert prompts[0].messages == () and prompts[0].conversation == ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "<|user|>hi<|assistant|>"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "<|system|>s<|user|>u<|assistant|>"),
    ],
)
def test_chat_template(prompt: Any, text: str, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    data = config(write_jsonl({"input": prompt}), apply_chat_template=True)
    (loaded,) = load_prompts(data, rollout(), tokenizer)
    assert loaded.text == text
    assert loaded.token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert list(loaded.conversation) == ([{"role": "user", "content": "hi"}] if prompt == "hi" else prompt)


def test_arguments_reach_the_chat_template(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{{ messages[0]['content'] }}{{ mood }}"
    data = config(
        write_jsonl({"input": "hi"}),
        apply_chat_template=True,
        apply_chat_template_kwargs={"chat_template": template, "mood": "!"},
    )
    assert load_prompts(data, rollout(), tokenizer)[0].text == "hi!"


def test_a_slice_selects_rows_and_keeps_their_index(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(*({"input": str(i)} for i in range(10)))
    prompts = load_prompts(config(f"{path}@[3:6]"), rollout(), tokenizer)
    assert [(p.index, p.text) for p in prompts] == [(3, "3"), (4, "4"), (5, "5")]


@pytest.mark.slow
def test_parquet_equals_jsonl(tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"input": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(5)]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    from_parquet = load_prompts(config(f"{file}@[1:4]", label_key="label"), rollout(), tokenizer)
    assert from_parquet == load_prompts(config(f"{write_jsonl(*rows)}@[1:4]", label_key="label"), rollout(), tokenizer)
    assert len(from_parquet) == 3


def test_long_prompts_are_dropped_and_counted(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl({"input": "1234"}, {"input": "12345"}, {"input": "123456"})
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(config(path), rollout(max_prompt_len=4), tokenizer)
    assert [p.text for p in prompts] == ["1234"]
    assert "2 of 3 prompts of" in caplog.text and "max_prompt_len (4 tokens)" in caplog.text


def test_prompts_too_long_for_a_response_are_dropped_and_counted(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl({"input": "1234"}, {"input": "12345"})
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(config(path), rollout(max_response_len=6), tokenizer, positions=10)
    assert [p.text for p in prompts] == ["1234"]
    assert "1 of 2" in caplog.text and "the model's 10 positions minus rollout.max_response_len=6" in caplog.text
    assert len(load_prompts(config(path), rollout(max_response_len=5), tokenizer, positions=10)) == 2
    assert len(load_prompts(config(path), rollout(max_prompt_len=4), tokenizer, positions=99)) == 1


@pytest.mark.parametrize(
    ("settings", "kept", "limit"),
    [
        ({}, 1, "rollout.max_context_len minus 1 token (4 tokens)"),
        ({"max_prompt_len": 4}, 1, "rollout.max_context_len minus 1 token (4 tokens)"),  # as derived
        ({"max_prompt_len": 3}, 0, "rollout.max_prompt_len (3 tokens)"),
        ({"max_response_len": 3}, 1, "rollout.max_context_len minus 1 token (4 tokens)"),
    ],
)
def test_prompts_that_leave_no_token_of_the_context_are_dropped(
    settings: dict[str, int],
    kept: int,
    limit: str,
    write_jsonl: Write,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_jsonl({"input": "1234"}, {"input": "12345"})
    given = rollout(max_context_len=5, **settings)
    if kept:
        # The model's positions do not matter: the context is at most as long.
        assert [p.text for p in load_prompts(config(path), given, tokenizer, positions=6)] == ["1234"]
        assert limit in caplog.text
        return
    with pytest.raises(DataError) as caught:
        load_prompts(config(path), given, tokenizer)
    assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "positions", "limit", "name"),
    [
        ({"max_context_len": 100}, 1000, 99, "rollout.max_context_len minus 1 token"),
        ({"max_context_len": 100}, 102, 95, "the model's 102 positions minus 7 tokens, which SGLang reserves"),
        ({"max_context_len": 100, "max_prompt_len": 95}, 102, 95, "the model's 102 positions minus 7"),
        ({"max_context_len": 100, "external": True}, 1000, 93, "rollout.max_context_len minus 7 tokens"),
        ({"max_context_len": 100, "engine": EngineKind.external}, None, 93, "rollout.max_context_len minus 7 tokens"),
        ({"max_response_len": 3}, 100, 93, "the model's 100 positions minus 7 tokens, which SGLang reserves"),
        ({"max_response_len": 30}, 100, 70, "the model's 100 positions minus rollout.max_response_len=30"),
        ({"max_response_len": 3, "max_prompt_len": 97}, 100, 97, "rollout.max_prompt_len"),
    ],
)
def test_servers_of_sglang_reserve_tokens(
    settings: dict[str, Any], positions: int | None, limit: int, name: str
) -> None:
    found = prompt_limit(rollout(**{"engine": EngineKind.sglang, **settings}), positions)
    assert found is not None and found.tokens == limit and found.name.startswith(name)
    assert prompt_limit(rollout(EngineKind.sglang), None) is None


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (['{"input": 1'], {}, "got '{\"input\": 1'; Expecting ',' delimiter (character 13)"),
        (['{"input": "a"}', "", "[1]"], {}, "rows.jsonl row 3 must be a JSON object, got list"),
        (['{"other": "a"}'], {}, "row 1 must have a field 'input', got fields other; correct data.input_key"),
        (['{"input": null}'], {}, "row 1 must have a field 'input', got null; correct data.input_key or the file"),
        (['{"input": 3}'], {}, "must have a string or a list of messages with `role` and `content`"),
        (['{"input": [{"text": "a"}]}'], {}, "must have a string or a list of messages"),
        (['{"input": [{"role": "user", "content": "a"}]}'], {}, "set data.apply_chat_template=true"),
        (
            ['{"input": [{"role": "user", "content": 7}]}'],
            {"apply_chat_template": True},
            "a list of text parts as content of message 1",
        ),
        (['{"input": "a"}', '{"input": "b"}'], {"label_key": "label"}, "correct data.label_key"),
        (
            ['{"input": "a", "label": NaN}'],
            {"label_key": "label"},
            "must have a JSON value as label under 'label', got nan",
        ),
        (
            ['{"input": "a", "metadata": [1]}'],
            {},
            "row 1 must have an object as metadata, or one as JSON text, got list under 'metadata'",
        ),
        (['{"input": "a"}', '{"input": "\\u00e9"}'], {}, "row 2 must fit the tokenizer"),
        (['{"input": ""}'], {}, "must have a prompt of at least one token"),
        ([], {}, "must have at least one usable prompt, got none; it has no rows"),
    ],
)
def test_errors_name_file_and_row(
    rows: list[str], settings: dict[str, Any], message: str, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(config(write_jsonl(*rows), **settings), rollout(), tokenizer)


def test_all_prompts_too_long(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"its only row is longer than rollout\.max_prompt_len \(1 token\)"):
        load_prompts(config(write_jsonl({"input": "12"})), rollout(max_prompt_len=1), tokenizer)


def test_other_files(tmp_path: Path, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"must be a file, got nothing at .*; check the path"):
        load_prompts(config(str(tmp_path / "none.jsonl")), rollout(), tokenizer)
    with pytest.raises(
        DataError, match=r"must end in \.jsonl, \.jsonl\.gz or \.parquet, got '\.csv'; convert it: rlscale-data convert"
    ):
        load_prompts(config(write_jsonl("a,b", name="rows.csv")), rollout(), tokenizer)
    with pytest.raises(DataError, match="must be a readable Parquet file"):
        load_prompts(config(write_jsonl("a,b", name="rows.parquet")), rollout(), tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"input": "\xe9"}\n')
    with pytest.raises(DataError, match="row 1 must be a JSON object"):
        load_prompts(config(str(tmp_path / "latin.jsonl")), rollout(), tokenizer)


@pytest.fixture
def ten(write_jsonl: Write) -> DataConfig:
    return config(write_jsonl(*({"input": str(i)} for i in range(10))))


def texts(source: FilePromptSource, num_prompts: int) -> list[str]:
    return [prompt.text for prompt in source.take(num_prompts)]


def test_without_shuffling_epochs_follow_the_file(ten: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    source = FilePromptSource(ten, rollout(), tokenizer)
    assert len(source) == 10
    assert texts(source, 8) + texts(source, 14) == [str(i % 10) for i in range(22)]


def test_every_epoch_is_complete_and_has_a_new_order(ten: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    source = FilePromptSource(ten, rollout(shuffle=True, seed=1), tokenizer)
    epochs = [texts(source, 10) for _ in range(3)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = FilePromptSource(ten, rollout(shuffle=True, seed=1), tokenizer)
    assert texts(again, 30) == epochs[0] + epochs[1] + epochs[2]
    other = FilePromptSource(ten, rollout(shuffle=True, seed=2), tokenizer)
    assert texts(other, 10) != epochs[0]


@pytest.mark.parametrize("taken", [0, 3, 10, 27])
def test_a_position_is_restored(taken: int, ten: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    source = FilePromptSource(ten, rollout(shuffle=True), tokenizer)
    source.take(taken)
    resumed = FilePromptSource(ten, rollout(shuffle=True), tokenizer)
    resumed.load_state_dict(source.state_dict())
    assert texts(resumed, 25) == texts(source, 25)


def test_a_position_in_other_data_is_rejected(ten: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    state = FilePromptSource(ten, rollout(), tokenizer).state_dict()
    shorter = FilePromptSource(config(f"{ten.prompt_data}@[0:9]"), rollout(), tokenizer)
    with pytest.raises(ConfigError, match=r"data\.prompt_data must have the 10 prompts .* got 9 prompts"):
        shorter.load_state_dict(state)
