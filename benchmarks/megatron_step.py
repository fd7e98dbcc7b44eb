"""Step time of the Megatron-core backend compared with FSDP2: same model, batch and micro-batches, on the same ranks.

Two ranks with one thread each over gloo. In each round all parallel layouts run one after the other; each makes one
step to warm up, then `--steps` measured steps. A step is `train` as in a run: packing, reference logprobs, loss,
backward, reduction and optimiser. The report has the medians of the slower rank over all steps, and the loss of the
last step, which shows that all layouts do the same work. Writes `results/megatron_step.md` and `.json`.

    python benchmarks/megatron_step.py [--rounds 2] [--steps 3]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
NUM_RANKS = 2
MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
SAMPLES, PROMPT, RESPONSE = 16, 32, 96
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "megatron, dp2": {},
    "megatron, tp2": {"tensor_model_parallel_size": 2},
    "megatron, tp2 with sequences": {"tensor_model_parallel_size": 2, "core_args": {"sequence_parallel": True}},
    "megatron, pp2": {"pipeline_model_parallel_size": 2},
    "megatron, cp2": {"context_parallel_size": 2},
}


def run_rank(rank: int, port: int, folder: Path, rounds: int, steps: int) -> None:
    """Runs one rank; rank 0 writes the times and losses of both."""
    import torch
    import torch.distributed as dist

    from rlscale.training.distributed import join_world

    join_world(rank, NUM_RANKS, "127.0.0.1", port, "gloo", 600.0)
    path, batch = (folder / "model.txt").read_text(), _batch()
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "loss": []} for name in LAYOUTS}
    for _ in range(rounds):
        for name, sizes in LAYOUTS.items():
            backend = _backend(name, sizes, path, rank)
            plan = _plan(batch, sizes)
            backend.train(batch, [plan])
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                result = backend.train(batch, [plan])
                seconds = torch.tensor(time.perf_counter() - started)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                found[name]["seconds"].append(seconds.item())
            found[name]["loss"].append(result.steps[0]["loss"])
            backend.close()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def make_model(folder: Path) -> str:
    """Creates a random Qwen3 of the size above."""
    from rlscale.config import ModelConfig
    from rlscale.config.groups.model import ModelBuild
    from rlscale.models.resolve_model import resolve_model

    return resolve_model(ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(folder / "models"), **MODEL))


def _batch() -> Any:
    import numpy as np

    from tests.unit.training.rollouts import make_batch

    batch = make_batch([(PROMPT, RESPONSE)] * SAMPLES, seed=3)
    # transformers gives the embedding of the padding token, 0, no gradient; Megatron-core does not treat it specially.
    return replace(batch, tokens=np.where(batch.tokens == 0, 14, batch.tokens))


def _plan(batch: Any, sizes: dict[str, Any]) -> Any:
    """Two micro-batches per data-parallel rank, or four on one where the ranks share all samples."""
    from tests.unit.training.rollouts import plan

    shared = any(name.endswith("parallel_size") for name in sizes)
    cuts = [list(range(i, SAMPLES, 4)) for i in range(4)]
    return plan(batch, [cuts] if shared else [cuts[:2], cuts[2:]])


def _backend(name: str, sizes: dict[str, Any], path: str, rank: int) -> Any:
    from rlscale.config import MegatronConfig, ModelConfig
    from rlscale.training.fsdp.backend import FsdpBackend
    from rlscale.training.megatron.backend import MegatronBackend
    from tests.unit.training.rollouts import spec

    made = spec(
        path,
        algo={"use_kl_loss": True, "kl_loss_coef": 0.1},
        ref_path=path,
        lr=1e-4,
        adam_eps=1e-4,  # a smaller value lets Adam amplify the rounding of vanishing gradients
        megatron=MegatronConfig(**sizes),
        model=ModelConfig(use_hf_config_for_megatron=True),
    )
    kind = FsdpBackend if name == "fsdp" else MegatronBackend
    return kind(made, rank=rank, world_size=NUM_RANKS)


def start_ranks(folder: Path, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), "--port", str(port)]
    command += ["--rounds", str(rounds), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=ROOT) for rank in range(NUM_RANKS)]
    assert [rank.wait() for rank in ranks] == [0] * NUM_RANKS, "a rank failed; its error is above"
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "found.json").read_text())
    return found


def report(found: dict[str, dict[str, list[float]]], load: float) -> str:
    base = statistics.median(found["fsdp"]["seconds"])
    rows = [
        "| backend and layout | step, s | fastest | slowest | relative to FSDP2 | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        median = statistics.median(one["seconds"])
        times = f"{median:.3f} | {min(one['seconds']):.3f} | {max(one['seconds']):.3f} | {median / base:.2f}x"
        rows.append(f"| {name} | {times} | {one['loss'][-1]:.7f} |")
    number = len(found["fsdp"]["seconds"])
    about = (
        f"{sentence([load])} Two ranks with one thread over gloo; Qwen3 of {MODEL['num_layers']} layers and hidden "
        f"size {MODEL['hidden_size']}, float32; {SAMPLES} samples of {PROMPT} + {RESPONSE} tokens, one optimiser step "
        f"with a reference. Medians of {number} steps, layouts interleaved. Made by "
        "`python benchmarks/megatron_step.py`."
    )
    return "\n".join(["# A step on Megatron-core compared with FSDP2", "", about, "", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.port, args.folder, args.rounds, args.steps)
        sys.stdout.flush()
        os._exit(0)  # threads of torch.distributed sometimes abort an interpreter that shuts down
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.txt").write_text(make_model(folder))
        found = start_ranks(folder, args.rounds, args.steps)
    text = report(found, load)
    (RESULTS / "megatron_step.md").write_text(text)
    content = {**machine(), "load": load, "found": found}
    (RESULTS / "megatron_step.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
