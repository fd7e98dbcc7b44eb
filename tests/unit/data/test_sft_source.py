import asyncio
import re
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, RolloutConfig
from rlscale.data.batch import build_batch
from rlscale.data.prompts import FilePromptSource, SftTarget, load_prompts
from rlscale.errors import ConfigError, DataError
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.rollout.sft import SftSource
from rlscale.types import Group

Write = Callable[..., str]


def source(path: str, tokenizer: PreTrainedTokenizerBase, *, label_key: str | None = "label") -> SftSource:
    data = DataConfig(prompt_data=path, label_key=label_key)
    return SftSource(FilePromptSource(data, RolloutConfig(), tokenizer), tokenizer, rollout_batch_size=2)


def rollout(sft: SftSource, rollout_id: int, *, version: int) -> list[Group]:
    async def groups() -> list[Group]:
        return [
            await sft.group(i, prompt, oldest=version, newest=version) for i, prompt in sft.next_prompts(rollout_id)
        ]

    return asyncio.run(groups())


def test_the_label_and_the_end_token_are_the_response(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(
        {"input": "1+1=", "label": "2"}, {"input": "9+3=", "label": "21"}, {"input": "0+0=", "label": "0"}
    )
    sft = source(path, tokenizer)
    groups = rollout(sft, 3, version=5)
    assert [g.index for g in groups] == [6, 7]
    sample = groups[1].samples[0]
    assert tokenizer.decode(sample.response_ids) == "21<|eos|>"
    assert sample.loss_mask.tolist() == [1, 1, 1] and sample.weight_versions.tolist() == [5, 5, 5]
    batch = build_batch(groups, version=5, has_rewards=sft.has_rewards)
    assert batch.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert [g.prompt.text for g in rollout(sft, 4, version=6)] == ["0+0=", "1+1="]


def test_the_position_is_restored(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_jsonl(*({"input": str(i), "label": "1"} for i in range(5)))
    first, second = source(path, tokenizer), source(path, tokenizer)
    rollout(first, 0, version=0)
    second.load_state_dict(first.state_dict())
    assert rollout(second, 1, version=1) == rollout(first, 1, version=1)


def test_a_prompt_without_label_is_an_error(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"prompt row 1 must have a label for algo\.loss_type=sft_loss"):
        rollout(source(write_jsonl({"input": "1"}), tokenizer, label_key=None), 0, version=0)


def test_a_tokenizer_without_end_token_is_rejected(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must have an end-of-sequence token"):
        source(write_jsonl({"input": "1", "label": "1"}), tokenizer)


def test_prompts_too_long_with_their_labels_are_dropped_with_a_warning(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    # No room is kept for a response: 4 + 1 + the end token fit 6 positions.
    path = write_jsonl({"input": "1+1=", "label": "2"}, {"input": "1+1=", "label": "22"}, {"input": "1=", "label": "1"})
    data, lengths = DataConfig(prompt_data=path, label_key="label"), RolloutConfig(max_response_len=100)
    with caplog.at_level("WARNING"):
        kept = load_prompts(data, lengths, tokenizer, positions=6, sft_target=SftTarget.labels)
    assert [prompt.index for prompt in kept] == [0, 2]
    assert "1 of 3 prompts with their labels of" in caplog.text and "were dropped: rows 2" in caplog.text


@pytest.mark.parametrize(("context", "positions"), [(6, None), (6, 9), (9, 6)])
def test_the_context_limits_prompts_with_their_labels(
    context: int, positions: int | None, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    # With the end token they have 6 and 7 tokens.
    data = DataConfig(
        prompt_data=write_jsonl({"input": "1+1=", "label": "2"}, {"input": "1+1=", "label": "22"}), label_key="label"
    )
    rollout = RolloutConfig(max_context_len=context)
    found = load_prompts(data, rollout, tokenizer, positions=positions, sft_target=SftTarget.labels)
    assert [prompt.label for prompt in found] == ["2"]


def test_rows_that_exceed_one_limit_or_the_other_are_counted_by_limit(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = DataConfig(
        prompt_data=write_jsonl({"input": "12345", "label": "1"}, {"input": "1", "label": "2345678"}),
        label_key="label",
    )
    rollout = RolloutConfig(max_prompt_len=2, max_context_len=8)
    found = (
        "got none; all 2 were dropped: 1 longer than rollout.max_prompt_len, 1 longer than rollout.max_context_len; "
        "the first one: row 1"
    )
    with pytest.raises(DataError, match=re.escape(found)):
        load_prompts(data, rollout, tokenizer, sft_target=SftTarget.labels)


def test_a_warning_lists_ten_rows_and_counts_the_others(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl({"input": "1"}, *[{"input": "12"}] * 12)
    with caplog.at_level("WARNING"):
        load_prompts(DataConfig(prompt_data=path), RolloutConfig(max_prompt_len=1), tokenizer)
    assert "rows 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more" in caplog.text


def test_a_label_that_the_tokenizer_cannot_read_is_an_error_at_load(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl({"input": "1", "label": "1"}, {"input": "1", "label": "\u00e9"})
    data = DataConfig(prompt_data=path, label_key="label")
    with pytest.raises(DataError, match="row 2 must fit the tokenizer"):
        load_prompts(data, RolloutConfig(), tokenizer, positions=6, sft_target=SftTarget.labels)


def test_prompts_of_a_custom_source_must_fit_the_model(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    data = DataConfig(prompt_data=write_jsonl({"input": "1+1=", "label": "22"}), label_key="label")
    prompts = FilePromptSource(data, RolloutConfig(), tokenizer)
    sft = SftSource(prompts, tokenizer, rollout_batch_size=1, positions=6)
    with pytest.raises(DataError, match=r"prompt row 1 must have at most 6 tokens with its answer, .* got 7"):
        rollout(sft, 0, version=0)
