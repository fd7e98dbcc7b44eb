"""Attention of one decoding step on a CPU: SGLang's `torch_native` backend against the plugin's batched attention,
with the keys gathered for each step (as for prompts) and in entries (as for decoding).

Run by `sglang_attention.py` with the interpreter that has SGLang and the plugin; prints one JSON object for each case.
All compute the same inputs alternately; the time is that of the process, so other processes count little.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from rlscale_sglang_cpu.attention import Plan, Workspace, attend
from rlscale_sglang_cpu.decode_cache import DecodeCache

REPEATS = 21


def main(config: Path, batch: int) -> None:
    torch.set_num_threads(1)
    fields = json.loads(config.read_text())
    for lengths, num_keys in (("128", [128] * batch), ("1 to 256", torch.linspace(1, 256, batch).int().tolist())):
        print(json.dumps({"batch": batch, "keys": lengths, **measure(fields, num_keys)}), flush=True)


def measure(fields: dict[str, int], num_keys: list[int]) -> dict[str, float]:
    """Medians of the milliseconds of all layers, their ratio, and the largest difference of the answers.

    Args:
        fields: of the model's config.json.
    """
    layers, size = fields["num_hidden_layers"], fields["head_dim"]
    heads, key_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    draw = torch.Generator().manual_seed(0)
    total, batch = sum(num_keys) + 1, len(num_keys)
    caches = [tuple(torch.randn(2, total, key_heads, size, generator=draw)) for _ in range(layers)]
    query = torch.randn(batch, heads, size, generator=draw)
    table = torch.zeros(batch, max(num_keys), dtype=torch.int32)
    slots = torch.randperm(total - 1, generator=draw).int() + 1
    for row, own in enumerate(slots.split(num_keys)):
        table[row, : len(own)] = own
    rows, lengths, scale = torch.arange(batch), torch.tensor(num_keys), size**-0.5
    stock = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)  # its constructor needs a running server
    workspace, entries = Workspace(), DecodeCache(layers)
    one, other, third = (torch.empty_like(query) for _ in range(3))

    def run_stock() -> None:
        for keys, values in caches:
            stock._run_sdpa_forward_decode(
                query, one, keys, values, table, rows, lengths, scaling=scale, enable_gqa=heads != key_heads
            )

    def run_gathered() -> None:
        plan = Plan(table, rows, [1] * batch, lengths.tolist(), heads // key_heads)
        for keys, values in caches:
            attend(query, other, keys, values, plan, workspace, scale=scale)

    def run_entries() -> None:
        step = entries.next_step(table, rows.tolist(), lengths.tolist())
        for keys, values in caches:
            entries.attend(query, third, keys, values, step, scale=scale)

    runs = (run_stock, run_gathered, run_entries)
    # The first round loads the entries; as the lengths stay the same, the others replace the newest token.
    taken = [[process_ms(run) for run in runs] for _ in range(REPEATS)][1:]
    stock_ms, gathered_ms, copies_ms = (statistics.median(column) for column in zip(*taken, strict=True))
    error = max(largest_difference(one, other), largest_difference(one, third))
    return {
        "stock_ms": stock_ms,
        "gathered_ms": gathered_ms,
        "batched_ms": copies_ms,
        "ratio": stock_ms / copies_ms,
        "error": error,
    }


def process_ms(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def largest_difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
