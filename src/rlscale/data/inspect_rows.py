"""Summary of prompt files: their rows, fields, lengths, and the rows that a run would drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from rlscale.config import DataConfig, OnBadRow, RolloutConfig, prompt_paths
from rlscale.data.prompt_reader import DroppedRow, SftTarget
from rlscale.data.prompts import make_reader
from rlscale.data.row_table import RowTable
from rlscale.data.rows import BadRowError, json_type
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_EXAMPLES = 3
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)

PROMPT_KEYS = ("input", "prompt", "messages", "conversations", "question", "problem", "query", "instruction")
LABEL_KEYS = ("label", "answer", "reward_model.ground_truth", "ground_truth", "solution", "response", "output")
"""Usual names of fields, most frequent first."""

_CHUNK_ROWS = 1024


class PlainTokenizer:
    """Stands for a tokenizer where no model is given: a character is a token, a message its role and its content."""

    eos_token = ""

    def get_vocab(self) -> dict[str, int]:
        """No vocabulary: every character is one token."""
        return {" ": 0}

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[range]]:
        """A token for each character."""
        return {"input_ids": [range(len(text)) for text in texts]}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Lines of `role: content`."""
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text + ("assistant: " if arguments.get("add_generation_prompt") else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSummary:
    """A field of the rows: its share, and the types of its values."""

    name: str
    num_rows: int
    types: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSummary:
    """Rows that a run would drop, or end with, for one reason."""

    reason: str
    num_rows: int
    first: str  # message or number of the first of them


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """Summary of the rows that were read."""

    num_rows: int
    num_read: int
    fields: list[FieldSummary] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of prompts, by QUANTILES
    dropped: list[DroppedSummary] = field(default_factory=list)
    examples: list[Prompt] = field(default_factory=list)


def guess_keys(config: DataConfig) -> dict[str, str]:
    """Names of the fields of prompt and label, by their keys, as far as the first row that is JSON has a usual one.

    Raises:
        DataError: the files cannot be read.
    """
    table = RowTable(prompt_paths(config))
    row, found = None, {}
    for number in range(min(len(table), _CHUNK_ROWS)):
        with suppress(BadRowError):  # counted by the summary
            row = table.row(number)
            break
    if row is None:
        return {}
    for setting, names in (("data.input_key", PROMPT_KEYS), ("data.label_key", LABEL_KEYS)):
        name = next((each for each in names if row.find(each) is not None), None)
        if name is not None:
            found[setting] = name
    return found


def summarize_rows(
    config: DataConfig,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase | PlainTokenizer,
    *,
    positions: int | None,
    sft_target: SftTarget | None,
    max_rows: int,
) -> DataSummary:
    """Reads at most `max_rows` rows, evenly spaced, as a run would.

    Args:
        positions: as `load_prompts`.

    Raises:
        DataError: the files cannot be read.
    """
    table = RowTable(prompt_paths(config))
    skipping = replace(config, on_bad_row=OnBadRow.skip)
    reader = make_reader(
        skipping, rollout, cast("PreTrainedTokenizerBase", tokenizer), positions=positions, sft_target=sft_target
    )
    numbers = range(0, len(table), -(-len(table) // max_rows))
    prompts: list[Prompt] = []
    dropped: list[DroppedRow] = []
    lengths: list[int] = []
    for start in range(0, len(numbers), _CHUNK_ROWS):
        for each in reader.read(numbers[start : start + _CHUNK_ROWS], table.row):
            if isinstance(each, DroppedRow):
                dropped.append(each)
                continue
            lengths.append(len(each.token_ids))
            if len(prompts) < NUM_EXAMPLES:
                prompts.append(each)
    return DataSummary(
        num_rows=len(table),
        num_read=len(numbers),
        fields=_summarize_fields(table, numbers),
        lengths=_quantiles(lengths),
        dropped=_summarize_dropped(dropped),
        examples=prompts,
    )


def _summarize_fields(table: RowTable, numbers: Sequence[int]) -> list[FieldSummary]:
    types: dict[str, Counter[str]] = {}
    for number in numbers:
        try:
            row = table.row(number)
        except BadRowError:
            continue  # counted among the dropped rows
        for name, value in row.fields.items():
            types.setdefault(name, Counter())[json_type(value)] += 1
    return [
        FieldSummary(name=name, num_rows=found.total(), types=dict(found.most_common()))
        for name, found in types.items()
    ]


def _summarize_dropped(dropped: Sequence[DroppedRow]) -> list[DroppedSummary]:
    first = {each.reason: each for each in reversed(dropped)}
    return [
        DroppedSummary(reason=reason, num_rows=number, first=first[reason].message or f"row {first[reason].index + 1}")
        for reason, number in Counter(each.reason for each in dropped).most_common()
    ]


def _quantiles(values: Sequence[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES] if ordered else []
