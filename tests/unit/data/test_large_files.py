"""Files that are too large to be read at the start: order, positions, dropped rows, weights."""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, OnBadRow, RolloutConfig
from rlscale.data import prompt_order, prompts
from rlscale.data.prompts import FilePromptSource
from rlscale.errors import ConfigError, DataError

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than two rows count as large."""
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 2)
    monkeypatch.setattr(prompts, "FIRST_ROWS", 2)


def texts(source: FilePromptSource, number: int) -> list[str]:
    return [prompt.text for prompt in source.take(number)]


def source(path: str, tokenizer: PreTrainedTokenizerBase, seed: int = 3, **settings: Any) -> FilePromptSource:
    rollout = {"shuffle": True, "seed": seed} | settings.pop("rollout", {})
    return FilePromptSource(DataConfig(prompt_data=path, **settings), RolloutConfig(**rollout), tokenizer)


@pytest.mark.parametrize("max_listed", [2, 100])
def test_the_order_is_that_of_a_small_file_and_is_restored(
    max_listed: int, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_order, "MAX_LISTED", max_listed)
    path = write_jsonl(*({"input": str(i)} for i in range(10)))
    large = source(path, tokenizer)
    assert len(large) == 10 and [p.text for p in large.prompts] == ["0", "1"]
    epochs = [texts(large, 10) for _ in range(3)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 100)
    assert texts(source(path, tokenizer), 30) == [*itertools.chain(*epochs)]
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 2)
    for taken in (0, 3, 10, 27):
        first, second = source(path, tokenizer), source(path, tokenizer)
        first.take(taken)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert texts(second, 25) == texts(first, 25)


def test_rows_are_dropped_when_they_are_drawn(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "1"}, {"input": "2"}, "{", {"input": "12345"}, {"input": "3"}]
    settings = {"on_bad_row": OnBadRow.skip, "rollout": {"shuffle": False, "max_prompt_len": 3}}
    path = write_jsonl(*rows)
    with caplog.at_level(logging.WARNING):
        found = source(path, tokenizer, **settings)
        assert not caplog.records and len(found) == 5
        assert texts(found, 4) == ["1", "2", "3", "1"]
    assert found.num_dropped == {"no JSON": 1, "longer than rollout.max_prompt_len": 1}
    assert found.state_dict() == {"epoch": 1, "position": 1, "num_prompts": 5}
    assert f"1 row of {path} dropped so far: 1 no JSON; the last one: {path} row 3 must be a JSON object" in (
        caplog.text
    )
    resumed = source(path, tokenizer, **settings)
    resumed.load_state_dict(found.state_dict())
    assert texts(resumed, 5) == texts(found, 5)
    with pytest.raises(DataError, match="row 3 must be a JSON object"):
        source(path, tokenizer, rollout={"shuffle": False}).take(3)


def test_an_epoch_without_a_usable_row_ends(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(*[{"input": "12345"}] * 5)
    with pytest.raises(
        DataError,
        match=r"got none; all 5 rows are longer than rollout.max_prompt_len \(3 tokens\); use "
        "shorter prompts, or increase rollout.max_prompt_len",
    ):
        source(path, tokenizer, rollout={"max_prompt_len": 3}).take(1)


def test_a_row_is_dropped_by_its_characters_before_the_tokenizer(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Counting:
        """The tokenizer, which records the lengths of its texts."""

        def __call__(self, given: list[str], **settings: Any) -> Any:
            seen.extend(map(len, given))
            return tokenizer(given, **settings)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    path = write_jsonl({"input": "1" * 1000}, {"input": "12345"}, {"input": "1"})
    counting: Any = Counting()
    data, rollout = DataConfig(prompt_data=path), RolloutConfig(max_prompt_len=3, shuffle=False)
    assert texts(FilePromptSource(data, rollout, counting), 1) == ["1"]
    assert max(seen) == 5


@pytest.mark.parametrize("checked", [2, 100])
def test_files_are_mixed_by_weight(
    checked: int, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CHECKED_ROWS", checked)
    first = write_jsonl(*({"input": f"1{i}"} for i in range(4)), name="a.jsonl")
    second = write_jsonl(*({"input": f"2{i}"} for i in range(6)), "[", name="b.jsonl")

    def mixed(**settings: Any) -> FilePromptSource:
        return source("", tokenizer, prompt_files=[first, second], on_bad_row=OnBadRow.skip, **settings)

    found = mixed(prompt_weights=[3, 1])
    drawn = texts(found, 48)
    # Rows that are dropped when they are drawn are replaced at the end of what is drawn together.
    for stop in range(1, 49) if checked == 100 else (48,):
        assert abs(sum(text[0] == "1" for text in drawn[:stop]) - 0.75 * stop) < 1
    ones, twos = ([text for text in drawn if text[0] == digit] for digit in "12")
    # Each file has whole epochs, each in a new order.
    assert all(set(ones[i : i + 4]) == {"10", "11", "12", "13"} for i in range(0, 36, 4))
    assert Counter(twos) == Counter({f"2{i}": 2 for i in range(6)})
    for taken in (0, 5, 31):
        before, after = mixed(prompt_weights=[3, 1]), mixed(prompt_weights=[3, 1])
        before.take(taken)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert texts(after, 20) == texts(before, 20)
    # Without weights the files are one.
    assert sorted(texts(mixed(), 10)) == sorted({*ones, *twos})
    with pytest.raises(ConfigError, match=r"data\.prompt_weights must have the 2 weights of the resumed run, got 0"):
        mixed().load_state_dict(found.state_dict() | {"num_prompts": len(mixed())})


def test_a_dropped_row_is_read_and_counted_once(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = source(write_jsonl(*[{"input": "1"}] * 3, {"input": "12345"}), tokenizer, rollout={"max_prompt_len": 3})
    assert texts(found, 30) == ["1"] * 30
    assert found.num_dropped == {"longer than rollout.max_prompt_len": 1}
    # A row that is not remembered is read and counted in each epoch.
    monkeypatch.setattr(prompts, "MAX_REMEMBERED", 0)
    found = source(write_jsonl(*[{"input": "1"}] * 3, {"input": "12345"}), tokenizer, rollout={"max_prompt_len": 3})
    assert texts(found, 30) == ["1"] * 30
    assert found.num_dropped["longer than rollout.max_prompt_len"] > 1
