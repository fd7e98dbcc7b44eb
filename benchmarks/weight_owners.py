"""Savings when experts are sent to the engines by their owners: time of a sync, and memory of the first trainer rank.

A random Qwen3 with experts is divided over 2 and over 4 ranks of one thread by `expert_model_parallel_size`. First rank
0 sends all weights, then each weight is sent by a rank that owns it, to one served embedded engine over gloo, verified
as in a run. Memory is the growth of the resident set of a rank during a sync.
Writes `results/weight_owners.md` and `.json`.

    python benchmarks/weight_owners.py [--repeats 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
NUM_RANKS = (2, 4)
BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 300.0


def write_model(folder: Path) -> int:
    """Writes a random Qwen3-MoE that consists mostly of experts; returns its bytes."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def measure_call(run: Any) -> tuple[float, int]:
    """Returns the seconds of a call, and the bytes by which the peak of the resident set exceeds the size before."""
    # 5 resets VmHWM, the peak, to the current size.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    started = time.perf_counter()
    run()
    return time.perf_counter() - started, _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def run_rank(rank: int, size: int, port: int, folder: Path, url: str, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from rlscale.config import MegatronConfig, ModelConfig, WeightChannelName
    from rlscale.engines.client.http_engine import HttpEngine
    from rlscale.training.distributed import join_world
    from rlscale.training.megatron.hf_mapping.export_hf import Exporter
    from rlscale.training.megatron.hf_mapping.load_hf import load_hf
    from rlscale.training.megatron.model.cpu_patches import megatron_device
    from rlscale.training.megatron.model.megatron_model import build_model
    from rlscale.training.megatron.parallel_dims import build_parallel_dims
    from rlscale.training.spec import WeightOwners
    from rlscale.types import EngineAddress
    from rlscale.weights.factory import ChannelSpec, make_channel

    torch.set_num_threads(1)
    join_world(rank, size, "127.0.0.1", port, "gloo", TIMEOUT_S)
    spec = ChannelSpec(
        name=WeightChannelName.process_group,
        backend="gloo",
        device="cpu",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        folder=folder / "weights",
        model_folder=folder,
    )
    found: dict[str, Any] = {}
    with megatron_device():
        megatron = MegatronConfig(expert_model_parallel_size=size)
        build_parallel_dims(megatron, seed=1)
        own = ModelConfig(use_hf_config_for_megatron=True)
        model = build_model(str(folder / "model"), model=own, megatron=megatron, dtype=torch.float32)
        load_hf(model, str(folder / "model"))
        version = 0
        for to in (WeightOwners.first, WeightOwners.owners):
            exporter = Exporter(model, to=to, bucket_bytes=BUCKET_BYTES)
            channel = make_channel(
                spec,
                make_engine=lambda address: HttpEngine(address, timeout_s=TIMEOUT_S),
                rank=rank,
                senders=exporter.senders,
            )
            channel.connect([EngineAddress(name="engine 0", url=url)])
            measured = []
            for _ in range(repeats + 1):
                version += 1
                # All ranks start the sync together.
                dist.barrier()
                measured.append(measure_call(lambda e=exporter, c=channel, v=version: c.push(e.weights(), v)))
            channel.close()
            # The first sync is not counted.
            seconds, memory = zip(*measured[1:], strict=True)
            found[to] = {
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "peak_bytes": max(memory),
                "sent_between_trainers": sum(exporter.plan.sent_bytes(each) for each in range(size)),
                "senders": list(exporter.senders),
            }
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


def measure(size: int, folder: Path, repeats: int) -> dict[str, Any]:
    from rlscale.engines.ports import free_port
    from rlscale.engines.process import EngineProcess

    port, url_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    url = f"http://127.0.0.1:{url_port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder / 'model'}", f"--port={url_port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    engine = EngineProcess(command, name="engine 0", url=url, env=environment, log_path=folder / "server.log")
    engine.start()
    try:
        engine.wait_ready(timeout_s=TIMEOUT_S)
        arguments = [str(each) for each in (size, port, folder, url, repeats)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--rank", str(rank), *arguments], env=environment, cwd=ROOT
            )
            for rank in range(size)
        ]
        assert [rank.wait() for rank in ranks] == [0] * size, "a rank failed; its error is above"
    finally:
        engine.stop()
    return {str(rank): json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(size)}


def report(found: dict[str, Any], num_bytes: int, load: float, repeats: int) -> str:
    lines = [
        "| ranks | sent by | sync, s | fastest - slowest | between trainers, MB | growth of rank 0, MB "
        "| max growth of others, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, ranks in found.items():
        for to, label in (("first", "rank 0"), ("owners", "owners")):
            one = ranks["0"][to]
            others = max(ranks[rank][to]["peak_bytes"] for rank in ranks if rank != "0")
            lines.append(
                f"| {size} | {label} | {one['median_s']:.3f} | {one['min_s']:.3f} - {one['max_s']:.3f} "
                f"| {one['sent_between_trainers'] / 1e6:.0f} | {one['peak_bytes'] / 1e6:.0f} | {others / 1e6:.0f} |"
            )
    description = (
        f"{sentence([load])} Qwen3 with 16 experts in each of 4 layers, float32, {num_bytes / 1e6:.0f} MB, divided "
        f"by experts over ranks of one thread; buckets of {BUCKET_BYTES // 2**20} MiB to one embedded engine over "
        f"gloo, all on this machine. Medians of {repeats} syncs after one that is not counted. Memory is the growth "
        "of a rank's resident set during a sync. Written by `python benchmarks/weight_owners.py`."
    )
    return "\n".join(["# Weights sent by their owners", "", description, "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", nargs=6, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank, size, port, folder, url, repeats = args.rank
        run_rank(int(rank), int(size), int(port), Path(folder), url, int(repeats))
        sys.stdout.flush()
        os._exit(0)  # threads of torch.distributed sometimes abort an interpreter that shuts down
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = write_model(folder / "model")
        found = {str(size): measure(size, folder, args.repeats) for size in NUM_RANKS}
    text = report(found, num_bytes, load, args.repeats)
    (RESULTS / "weight_owners.md").write_text(text)
    content = {**machine(), "load": load, "model_bytes": num_bytes, "found": found}
    (RESULTS / "weight_owners.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
