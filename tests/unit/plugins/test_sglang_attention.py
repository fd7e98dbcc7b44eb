"""Batched attention of the plugin for SGLang on a CPU, against attention of one sequence at a time."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).parents[3] / "plugins" / "sglang_cpu" / "src"
HEADS, KEY_HEADS, DIM, VALUE_DIM = 6, 2, 8, 4


@pytest.fixture(autouse=True)
def plugin_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOURCE))


def import_attention() -> Any:
    from rlscale_sglang_cpu import attention

    return attention


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New tokens of sequences whose keys lie in scattered slots of a cache."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    rows: Tensor
    num_new: Sequence[int]
    num_keys: Sequence[int]


def make_batch(num_new: Sequence[int], num_keys: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
    draw = torch.Generator().manual_seed(sum(num_keys))
    total, longest = sum(num_keys), max(num_keys)
    slots = torch.randperm(total + 5, generator=draw)[:total]
    rows = torch.randperm(len(num_keys) + 3, generator=draw)[: len(num_keys)]
    table = torch.full((len(num_keys) + 3, longest + 2), total + 4)  # the rest of a row is of older requests
    for row, count, end in zip(rows, num_keys, itertools.accumulate(num_keys), strict=True):
        table[row, :count] = slots[end - count : end]
    return Batch(
        query=torch.randn(sum(num_new), HEADS, DIM, generator=draw).to(dtype),
        keys=torch.randn(total + 5, KEY_HEADS, DIM, generator=draw).to(dtype),
        values=torch.randn(total + 5, KEY_HEADS, VALUE_DIM, generator=draw).to(dtype),
        table=table,
        rows=rows,
        num_new=num_new,
        num_keys=num_keys,
    )


def attend_one_by_one(batch: Batch, window: int | None = None) -> Tensor:
    """Softmax attention written out for each sequence, in float64."""
    answers, start = [], 0
    for row, new, total in zip(batch.rows, batch.num_new, batch.num_keys, strict=True):
        slots = batch.table[row, :total]
        keys, values = (t[slots].double().repeat_interleave(HEADS // KEY_HEADS, 1) for t in (batch.keys, batch.values))
        scores = torch.einsum("qhd,khd->hqk", batch.query[start : start + new].double(), keys) / DIM**0.5
        position, key = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        hidden = (key > position) if window is None else (key > position) | (key < position - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        answers.append(torch.einsum("hqk,khd->qhd", weights, values))
        start += new
    return torch.cat(answers)


def attend_batched(batch: Batch, window: int | None = None) -> Tensor:
    attention = import_attention()
    plan = attention.Plan(batch.table, batch.rows, batch.num_new, batch.num_keys, HEADS // KEY_HEADS)
    output = torch.full((len(batch.query), HEADS, VALUE_DIM), torch.nan, dtype=batch.query.dtype)
    return attention.attend(batch.query, output, batch.keys, batch.values, plan, attention.Workspace(), window=window)


CASES = [
    ([1], [1]),
    ([1] * 5, [7, 1, 30, 8, 200]),  # decoding
    ([3, 9, 1, 40], [3, 9, 1, 40]),  # prompts
    ([3, 9, 1, 40], [20, 9, 33, 41]),  # prompts with a prefix in the cache
]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("num_new", "num_keys"), CASES)
def test_it_equals_attention_of_one_sequence_at_a_time(
    num_new: list[int], num_keys: list[int], window: int | None
) -> None:
    batch = make_batch(num_new, num_keys)
    torch.testing.assert_close(
        attend_batched(batch, window).double(), attend_one_by_one(batch, window), rtol=0, atol=1e-6
    )


def test_half_precision() -> None:
    batch = make_batch([1] * 9, [7, 1, 30, 8, 200, 9, 9, 12, 31], torch.bfloat16)
    torch.testing.assert_close(attend_batched(batch).double(), attend_one_by_one(batch), rtol=0.02, atol=0.02)


def test_it_reads_no_other_slot_of_the_cache() -> None:
    batch = make_batch([2, 1, 5], [9, 20, 5])
    used = torch.cat([batch.table[row, :n] for row, n in zip(batch.rows, batch.num_keys, strict=True)])
    expected = attend_batched(batch)
    unused = torch.ones(len(batch.keys), dtype=torch.bool)
    unused[used] = False
    unused[0] = False  # padding reads it and hides it: SGLang keeps slot 0 for padding, with finite values
    batch.keys[unused], batch.values[unused] = torch.nan, torch.nan
    assert torch.equal(attend_batched(batch), expected)


def test_groups_hold_each_sequence_once_and_bound_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = import_attention()
    monkeypatch.setattr(attention, "MAX_KEYS", 100)
    draw = torch.Generator().manual_seed(0)
    num_keys = torch.randint(1, 90, (64,), generator=draw).tolist()
    num_new = [min(n, m) for n, m in zip(torch.randint(1, 30, (64,), generator=draw).tolist(), num_keys, strict=True)]
    groups = list(attention.group_similar(num_new, num_keys, 1))
    assert sorted(i for group in groups for i in group) == list(range(64))
    for group in groups:
        keys, queries = [num_keys[i] for i in group], [num_new[i] for i in group]
        assert max(keys) <= 2 * min(keys) and max(queries) <= 2 * min(queries)
        assert len(group) == 1 or len(group) * max(keys) <= 100
    assert len(groups) < 64


def test_sequences_of_one_length_are_one_group() -> None:
    assert list(import_attention().group_similar([1] * 64, [128] * 64, 2)) == [list(range(64))]


def test_a_plan_fits_sequences_of_its_lengths_only() -> None:
    batch = make_batch([1, 1], [4, 5])
    plan = import_attention().Plan(batch.table, batch.rows, batch.num_new, batch.num_keys, 1)
    assert plan.fits(torch.tensor([4, 5])) and not plan.fits(torch.tensor([5, 6]))


def test_memory_is_used_again_and_grows() -> None:
    workspace, cache = import_attention().Workspace(), torch.arange(20.0).view(10, 2)
    slots = torch.tensor([3, 1, 3])
    first = workspace.gather("keys", cache, slots)
    assert torch.equal(first, cache[slots])
    again = workspace.gather("keys", cache, slots[:2])
    assert torch.equal(again, cache[slots[:2]]) and again.data_ptr() == first.data_ptr()
    assert torch.equal(workspace.gather("keys", cache, torch.arange(10)), cache)
    assert workspace.gather("values", cache, slots).data_ptr() != first.data_ptr()
