"""Entries of the requests that decode in SGLang on a CPU, against attention written out for each request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).parents[3] / "plugins" / "sglang_cpu" / "src"
HEADS, KEY_HEADS, DIM, VALUE_DIM = 4, 2, 8, 4
NUM_SLOTS, NUM_ROWS, CONTEXT = 2048, 12, 200


@pytest.fixture(autouse=True)
def plugin_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOURCE))


def import_cache() -> Any:
    from rlscale_sglang_cpu import decode_cache

    return decode_cache


class Server:
    """A paged cache of several layers, as SGLang fills it. Freed slots keep their values and are used again."""

    def __init__(self, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        self.draw, self.dtype = torch.Generator().manual_seed(0), dtype
        self.layers = [
            (self.random(NUM_SLOTS, KEY_HEADS, DIM), self.random(NUM_SLOTS, KEY_HEADS, VALUE_DIM))
            for _ in range(num_layers)
        ]
        self.table = torch.zeros(NUM_ROWS, CONTEXT, dtype=torch.int32)
        self.free = torch.randperm(NUM_SLOTS, generator=self.draw).tolist()
        self.lengths: dict[int, int] = {}  # by row, in the order of the batch

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def write(self, row: int, num_tokens: int) -> None:
        """Appends tokens to a request."""
        for _ in range(num_tokens):
            slot = self.free.pop()
            self.table[row, self.lengths[row]] = slot
            self.lengths[row] += 1
            for keys, values in self.layers:
                keys[slot], values[slot] = self.random(KEY_HEADS, DIM), self.random(KEY_HEADS, VALUE_DIM)

    def extend(self, row: int, num_tokens: int) -> None:
        """Opens a request with a prompt."""
        self.lengths[row] = 0
        self.write(row, num_tokens)

    def finish(self, row: int) -> None:
        self.free += self.table[row, : self.lengths.pop(row)].tolist()

    def next_step(self, cache: Any) -> Any:
        """Appends a token to each request."""
        for row in self.lengths:
            self.write(row, 1)
        return cache.next_step(self.table, list(self.lengths), list(self.lengths.values()))

    def attend(self, cache: Any, step: Any, layer: int, *, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Answers of the cache, and those of softmax attention written out in float64."""
        query, (keys, values) = self.random(len(self.lengths), HEADS, DIM), self.layers[layer]
        output = torch.full((len(query), HEADS, VALUE_DIM), torch.nan, dtype=self.dtype)
        found = cache.attend(query, output, keys, values, step, window=window)
        expected = []
        for i, (row, length) in enumerate(self.lengths.items()):
            first = 0 if window is None else max(0, length - 1 - window)
            slots = self.table[row, first:length]
            own = [each[slots].double().repeat_interleave(HEADS // KEY_HEADS, 1) for each in (keys, values)]
            weights = (torch.einsum("hd,khd->hk", query[i].double(), own[0]) / DIM**0.5).softmax(-1)
            expected.append(torch.einsum("hk,khd->hd", weights, own[1]))
        return found, torch.stack(expected)

    def check(self, cache: Any, step: Any, layers: Sequence[int] = (0, 1), window: int | None = None) -> None:
        for layer in layers:
            found, expected = self.attend(cache, step, layer, window=window)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def opened(prompts: Mapping[int, int], **options: Any) -> tuple[Server, Any]:
    server = Server(**options)
    for row, num_tokens in prompts.items():
        server.extend(row, num_tokens)
    return server, import_cache().DecodeCache(2)


@pytest.mark.parametrize("window", [None, 5])
def test_requests_of_many_lengths_over_several_widths(window: int | None) -> None:
    server, cache = opened({3: 1, 0: 60, 7: 63, 5: 120, 1: 100})
    for _ in range(12):
        server.check(cache, server.next_step(cache), window=window)
    assert {entry.width for entry in cache._entries.values()} == {64, 128, 256}


def test_requests_that_come_and_go() -> None:
    server, cache = opened({row: 50 + row for row in range(6)})
    draw = torch.Generator().manual_seed(1)
    for i in range(40):
        server.check(cache, server.next_step(cache))
        rows = list(server.lengths)
        if i % 3 == 0 and len(rows) > 2:
            server.finish(rows[int(torch.randint(len(rows), (), generator=draw))])
        if i % 4 == 0 and (unused := [row for row in range(NUM_ROWS) if row not in server.lengths]):
            row = unused[int(torch.randint(len(unused), (), generator=draw))]
            cache.invalidate([row])
            server.extend(row, int(torch.randint(1, 130, (), generator=draw)))
    assert set(cache._entries) >= set(server.lengths)


def test_a_row_that_another_request_takes_is_loaded_again() -> None:
    server, cache = opened({0: 10, 1: 12})
    server.check(cache, server.next_step(cache))
    server.finish(0)
    server.lengths = {0: 0, **server.lengths}
    server.write(0, 11)  # as long as the request before: only `invalidate` distinguishes them
    cache.invalidate([0])
    server.check(cache, server.next_step(cache))


def test_a_request_that_was_extended_between_two_steps_is_loaded_again() -> None:
    server, cache = opened({0: 10, 1: 12})
    server.check(cache, server.next_step(cache))
    server.write(1, 5)
    server.check(cache, server.next_step(cache))


def test_a_layer_that_missed_a_step_is_loaded_again() -> None:
    server, cache = opened({0: 10, 1: 12})
    server.check(cache, server.next_step(cache))
    server.check(cache, server.next_step(cache), layers=[0])
    server.check(cache, server.next_step(cache))


def test_a_step_may_be_computed_twice() -> None:
    server, cache = opened({0: 10, 1: 64})
    server.check(cache, server.next_step(cache))
    step = server.next_step(cache)
    server.check(cache, step)
    server.check(cache, step)
    server.check(cache, server.next_step(cache))


def test_a_cache_that_sglang_allocated_again_is_loaded() -> None:
    server, cache = opened({0: 10, 1: 12})
    server.check(cache, server.next_step(cache))
    server.layers = [(keys.clone(), values.clone()) for keys, values in server.layers]
    server.check(cache, server.next_step(cache))
    assert len(cache._layers) == 2


def test_only_the_new_token_is_read_from_the_paged_cache() -> None:
    server, cache = opened({0: 10, 1: 70})
    server.check(cache, server.next_step(cache))
    step = server.next_step(cache)
    newest = [int(server.table[row, length - 1]) for row, length in server.lengths.items()]
    query, (keys, values) = server.random(2, HEADS, DIM), server.layers[0]
    hidden_keys, hidden_values = keys.clone(), values.clone()
    output = cache.attend(query, torch.empty(2, HEADS, VALUE_DIM), keys, values, step).clone()
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[newest] = False
    keys[others], values[others] = torch.nan, torch.nan
    assert torch.equal(cache.attend(query, torch.empty(2, HEADS, VALUE_DIM), keys, values, step), output)
    keys.copy_(hidden_keys)
    values.copy_(hidden_values)
    server.check(cache, server.next_step(cache))


def test_half_precision() -> None:
    server, cache = opened({0: 10, 1: 70}, dtype=torch.bfloat16)
    for _ in range(3):
        found, expected = server.attend(cache, server.next_step(cache), 0)
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


def test_memory_of_an_unused_width_is_freed() -> None:
    server, cache = opened({0: 64, 1: 10})
    server.check(cache, server.next_step(cache))
    assert {width for layer in cache._layers.values() for width in layer.keys} == {64, 128}
    server.finish(0)
    server.check(cache, server.next_step(cache))
    assert {width for layer in cache._layers.values() for width in layer.keys} == {64}


def test_room_counts_the_padding_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_cache()
    cache = module.DecodeCache(3)
    monkeypatch.setattr(module, "MAX_BYTES", 3 * 10 * (64 + 128))
    assert cache.has_room([64, 65], 10) and not cache.has_room([64, 65, 1], 10)


def test_a_step_fits_requests_of_its_lengths_only() -> None:
    server, cache = opened({0: 10, 1: 12})
    step = server.next_step(cache)
    assert step.fits(torch.tensor([11, 13])) and not step.fits(torch.tensor([12, 14]))
