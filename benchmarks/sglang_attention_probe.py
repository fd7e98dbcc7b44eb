"""Attention of one decoding step on a CPU: SGLang's `torch_native` backend against the plugin's batched attention.

Run by `sglang_attention.py` with the interpreter that has SGLang and the plugin; prints one JSON object for each case.
Both compute the same inputs alternately; the time is that of the process, so other processes count little.
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
    keys, values = torch.randn(2, total, key_heads, size, generator=draw)
    query = torch.randn(batch, heads, size, generator=draw)
    table = torch.zeros(batch, max(num_keys), dtype=torch.int32)
    slots = torch.randperm(total - 1, generator=draw).int() + 1
    for row, own in enumerate(slots.split(num_keys)):
        table[row, : len(own)] = own
    rows, lengths, scale = torch.arange(batch), torch.tensor(num_keys), size**-0.5
    stock = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)  # its constructor needs a running server
    workspace, one, other = Workspace(), torch.empty_like(query), torch.empty_like(query)

    def run_stock() -> None:
        for _ in range(layers):
            stock._run_sdpa_forward_decode(
                query, one, keys, values, table, rows, lengths, scaling=scale, enable_gqa=heads != key_heads
            )

    def run_batched() -> None:
        plan = Plan(table, rows, [1] * batch, lengths.tolist(), heads // key_heads)
        for _ in range(layers):
            attend(query, other, keys, values, plan, workspace, scale=scale)

    taken = [(process_ms(run_stock), process_ms(run_batched)) for _ in range(REPEATS)][1:]
    stock_ms, batched_ms = (statistics.median(column) for column in zip(*taken, strict=True))
    error = largest_difference(one, other)
    return {"stock_ms": stock_ms, "batched_ms": batched_ms, "ratio": stock_ms / batched_ms, "error": error}


def process_ms(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def largest_difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
