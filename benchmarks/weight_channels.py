"""How fast are the weight channels, beside what the machine can do at all?

For models of 1M, 100M and 400M parameters in float32 (random Qwen3s), weights go from this process into a served
embedded engine by every channel, verified as in a run. In turn with them, in the same run: a memcpy of as many bytes,
and a gloo broadcast of as many to another process. Writes `benchmarks/results/weight_channels.md` and `.json`.

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
REST_S = 0.1  # before each, in which the last one ends: a sync comes after a step of the trainer
BUCKET_BYTES = 512 * 2**20  # the default of train.update_weight_buffer_size
# layers, hidden size, of the MLP, vocabulary
SHAPES = {1: (2, 128, 384, 4096), 100: (12, 768, 2304, 16384), 400: (24, 1024, 3072, 49152)}

Weights = dict[str, Tensor]


def write_model(folder: Path, millions: int) -> Weights:
    """A random Qwen3 of about that size, on disk and in memory."""
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
def served(folder: Path) -> Iterator[EngineAddress]:
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


def use(address: EngineAddress) -> None:
    """One token by the weights just sent, as in a run: an engine prepares new weights for use after the sync."""

    async def ask() -> None:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=1))
        await engine.close()

    asyncio.run(ask())


def updated(weights: Weights) -> Weights:
    """After a step: every element moved by about a thousandth of its size."""
    torch.manual_seed(1)
    return {name: tensor + 1e-3 * tensor.std() * torch.randn_like(tensor) for name, tensor in weights.items()}


def seconds_of(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(millions: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of everything at one size, each in turn, `repeats` times after one time unmeasured."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        states = [write_model(folder / "model", millions)]
        states.append(updated(states[0]))
        num_bytes = sum(tensor.nbytes for tensor in states[0].values())
        address = stack.enter_context(served(folder))
        channels = {each: open_channel(each, folder, address) for each in WeightChannelName}
        for channel in channels.values():
            stack.callback(channel.close)
        runs: dict[str, Callable[[int], float]] = {"memcpy": _plain(memcpy(num_bytes, num_threads=1))}
        runs["memcpy, 2 threads"] = _plain(memcpy(num_bytes, num_threads=2))
        runs["gloo broadcast"] = _plain(stack.enter_context(gloo_broadcast(num_bytes)))
        sizes: dict[str, int] = {}
        versions = iter(range(1, 10_000))

        def push(kind: WeightChannelName, turn: int) -> float:
            channel, state = channels[kind], states[turn % 2]
            if kind == WeightChannelName.delta:  # the others have written what this channel's engine held
                channel.push(iter(states[(turn + 1) % 2].items()), next(versions))
            report = channel.push(iter(state.items()), next(versions))
            sizes[kind] = report.num_bytes
            use(address)
            return report.seconds

        for kind in WeightChannelName:
            runs[kind] = lambda turn, kind=kind: push(kind, turn)
        taken: dict[str, list[float]] = {each: [] for each in runs}
        # What a channel writes to files goes on to the disk in the background: those channels come last.
        by_file = [WeightChannelName.disk, WeightChannelName.delta]
        for turn_of in ([each for each in runs if each not in by_file], by_file):
            for turn in range(repeats + 1):
                for each in turn_of:
                    time.sleep(REST_S)
                    taken[each].append(runs[each](turn))
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
            for each, values in taken.items()
        ]
        began = time.perf_counter()
        for tensor in states[0].values():
            checksum(tensor)
        rows.append({"millions": millions, "what": "checksum alone", "bytes": num_bytes, "sent_bytes": num_bytes})
        rows[-1] |= dict.fromkeys(("median_s", "min_s", "max_s"), time.perf_counter() - began)
        return rows


def _plain(run: Callable[[], None]) -> Callable[[int], float]:
    return lambda turn: seconds_of(run)


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
        "# Weight channels beside gloo and memcpy\n\n"
        f"{datetime.date.today()}, {where}. Load average before and after: {load[0]:.1f}, {load[1]:.1f}; on a machine "
        "that does other things too (above about 1) channels lose more than the raw rates, as two processes must run "
        f"at once. float32 weights into one served embedded engine, both on this machine; medians of {repeats}, "
        "everything in turn, files last. The time of a channel is that of the whole sync: pause, transfer, checksums "
        "on both sides, version read back, resume. GB/s count the bytes of the model. `disk` writes to a file system "
        "and reads it back (from the page cache); `delta` after an update that changed every element by about 0.1 %. "
        "Made by "
        "`python benchmarks/weight_channels.py`.\n\n"
        f"{table(rows)}\n\n"
        "Where the time goes: a sync makes seven or more HTTP calls whatever its size, some 5 ms. `process_group` "
        "takes tensors as they lie in memory, over four connections; the raw broadcast is one tensor over one. "
        "`shared_memory` copies every byte twice, into the ring and out of it, and both sides hash it, by one core "
        "each. A memcpy is libc's, within one process; where two threads are hardly faster than one, it takes all of "
        "the memory's bandwidth.\n"
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
