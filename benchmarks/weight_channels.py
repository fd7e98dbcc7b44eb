"""Speed of the weight channels, compared with the raw speed of the machine.

For models of 1M, 100M and 400M parameters in float32 (random Qwen3s), every channel sends the weights of this process
to a served embedded engine, verified as in a run. Interleaved with them: a memcpy of the same number of bytes, and a
gloo broadcast of it to another process. Writes `benchmarks/results/weight_channels.md` and `.json`.

    python benchmarks/weight_channels.py [--millions 1 100 400] [--repeats 9]
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from weight_limits import TIMEOUT_S, gloo_broadcast, memcpy

from rlscale.algo.checksum import checksum
from rlscale.config import WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.types import EngineAddress, SamplingParams
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.sync import WeightSync

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rlscale", "torch", "xxhash", "zstandard", "aiohttp")
# Before each measurement, so that the last one has ended: a sync comes after a step of the trainer.
PAUSE_S = 0.1
BUCKET_BYTES = 512 * 2**20  # the default of train.update_weight_buffer_size
# layers, hidden size, of the MLP, vocabulary
SHAPES = {1: (2, 128, 384, 4096), 100: (12, 768, 2304, 16384), 400: (24, 1024, 3072, 49152)}

Weights = dict[str, Tensor]


def write_model(folder: Path, millions: int) -> Weights:
    """Writes a random Qwen3 of about that size and returns its weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, mlp, vocabulary = SHAPES[millions]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextmanager
def serve_model(folder: Path) -> Iterator[EngineAddress]:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder / 'model'}", f"--port={port}"]
    process = EngineProcess(command, name="engine 0", url=url, env=os.environ, log_path=folder / "server.log")
    process.start()
    try:
        process.wait_ready(timeout_s=TIMEOUT_S)
        yield EngineAddress(name="engine 0", url=url)
    finally:
        process.stop()


def open_channel(name: WeightChannelName, folder: Path, address: EngineAddress) -> WeightSync:
    spec = ChannelSpec(
        name=name,
        backend="gloo",
        device="cpu",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        folder=folder / name,
        model_folder=folder / "model",
    )
    channel = make_channel(spec, make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S), rank=0)
    channel.connect([address])
    return channel


def generate_token(address: EngineAddress) -> None:
    """Generates one token with the weights just sent: an engine prepares new weights for use after the sync."""

    async def request() -> None:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=1))
        await engine.close()

    asyncio.run(request())


def perturb(weights: Weights) -> Weights:
    """Returns weights as after a step: every element changed by about a thousandth of its size."""
    torch.manual_seed(1)
    return {name: tensor + 1e-3 * tensor.std() * torch.randn_like(tensor) for name, tensor in weights.items()}


def time_call(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(millions: int, repeats: int) -> list[dict[str, Any]]:
    """Measures everything at one size, interleaved, `repeats` times after one time that is not counted."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        states = [write_model(folder / "model", millions)]
        states.append(perturb(states[0]))
        num_bytes = sum(tensor.nbytes for tensor in states[0].values())
        address = stack.enter_context(serve_model(folder))
        channels = {each: open_channel(each, folder, address) for each in WeightChannelName}
        for channel in channels.values():
            stack.callback(channel.close)
        runs: dict[str, Callable[[int], float]] = {"memcpy": _without_round(memcpy(num_bytes, num_threads=1))}
        runs["memcpy, 2 threads"] = _without_round(memcpy(num_bytes, num_threads=2))
        runs["gloo broadcast"] = _without_round(stack.enter_context(gloo_broadcast(num_bytes)))
        sizes: dict[str, int] = {}
        versions = iter(range(1, 10_000))

        def push(kind: WeightChannelName, round_index: int) -> float:
            channel, state = channels[kind], states[round_index % 2]
            if kind == WeightChannelName.delta:
                # Not measured: the other channels have overwritten the weights that the delta starts from.
                channel.push(iter(states[(round_index + 1) % 2].items()), next(versions))
            report = channel.push(iter(state.items()), next(versions))
            sizes[kind] = report.num_bytes
            generate_token(address)
            return report.seconds

        for kind in WeightChannelName:
            runs[kind] = lambda round_index, kind=kind: push(kind, round_index)
        seconds: dict[str, list[float]] = {each: [] for each in runs}
        # The kernel writes the files of a channel to disk in the background, so channels with files come last.
        with_files = [WeightChannelName.disk, WeightChannelName.delta]
        for interleaved in ([each for each in runs if each not in with_files], with_files):
            for round_index in range(repeats + 1):
                for each in interleaved:
                    time.sleep(PAUSE_S)
                    seconds[each].append(runs[each](round_index))
        rows = [
            {
                "millions": millions,
                "what": each,
                "bytes": num_bytes,
                "sent_bytes": sizes.get(each, num_bytes),
                "median_s": statistics.median(values[-repeats:]),
                "min_s": min(values[-repeats:]),
                "max_s": max(values[-repeats:]),
            }
            for each, values in seconds.items()
        ]
        started = time.perf_counter()
        for tensor in states[0].values():
            checksum(tensor)
        rows.append({"millions": millions, "what": "checksum alone", "bytes": num_bytes, "sent_bytes": num_bytes})
        rows[-1] |= dict.fromkeys(("median_s", "min_s", "max_s"), time.perf_counter() - started)
        return rows


def _without_round(run: Callable[[], None]) -> Callable[[int], float]:
    return lambda round_index: time_call(run)


RAW_OF = {
    WeightChannelName.process_group: "gloo broadcast",
    WeightChannelName.shared_memory: "memcpy",
    WeightChannelName.disk: "memcpy",
    WeightChannelName.delta: "memcpy",
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| parameters | what | MB sent | median s | min - max s | GB/s | of the raw rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        raw = next((r for r in rows if r["what"] == RAW_OF.get(row["what"]) and r["millions"] == row["millions"]), None)
        share = "" if raw is None else f"{raw['median_s'] / row['median_s']:.2f} of {raw['what']}"
        lines.append(
            f"| {row['millions']}M | {row['what']} | {row['sent_bytes'] / 1e6:.0f} | {row['median_s']:.4f} "
            f"| {row['min_s']:.4f} - {row['max_s']:.4f} | {row['bytes'] / row['median_s'] / 1e9:.2f} | {share} |"
        )
    return "\n".join(lines)


def write(rows: list[dict[str, Any]], repeats: int, load: tuple[float, float]) -> None:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    where = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, {versions}"
    text = (
        "# Weight channels compared with gloo and memcpy\n\n"
        f"{datetime.date.today()}, {where}. Load average before and after: {load[0]:.1f}, {load[1]:.1f}; on a busy "
        "machine (above about 1) channels lose more than the raw rates, because two processes must run "
        f"at the same time. float32 weights into one served embedded engine, both on this machine; medians of "
        f"{repeats}, interleaved, channels with files last. The time of a channel includes the whole sync: pause, "
        "transfer, checksums on both sides, version read back, resume. GB/s counts the bytes of the model. "
        "`disk` writes to a file system and reads it back (from the page cache); "
        "`delta` after an update that changed every element by about 0.1 %. "
        "Written by "
        "`python benchmarks/weight_channels.py`.\n\n"
        f"{table(rows)}\n\n"
        "Cost: a sync of any size makes at least seven HTTP calls, about 5 ms. `process_group` sends tensors from "
        "their own memory over four connections; the raw broadcast sends one tensor over one connection. "
        "`shared_memory` copies every byte twice, into the ring and out of it, and both sides hash it with one core "
        "each. A memcpy is libc's, within one process; if two threads are hardly faster than one, it uses the whole "
        "memory bandwidth.\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "weight_channels.md").write_text(text)
    (RESULTS / "weight_channels.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.stdout.write(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 100, 400], choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for millions in arguments.millions:
        rows += measure(millions, arguments.repeats)
        write(rows, arguments.repeats, (before, os.getloadavg()[0]))


if __name__ == "__main__":
    main()
