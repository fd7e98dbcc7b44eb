"""Program of the ranks of context groups, which `test_context_parallel.py` starts.

python -m tests.ranks.training.context_parallel_ranks <model> <folder> <port of two ranks> <port of four>

One process imports everything and then forks the ranks, which costs the time of one start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from rlscale.config import ComputeDtype, LoraConfig, MisConfig, MisLevel, OffloadMode, OptimizerName
from rlscale.training.attention.context_attention import context_attention
from rlscale.training.attention.packed import packed_attention
from rlscale.training.distributed import RankGrid, join_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.packing.context_shard import pack_share
from rlscale.training.packing.microbatch import pack
from rlscale.training.spec import CriticSpec, ModelSource, OffloadSpec, TrainerSpec
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import PROMPT_OF, RAGGED, make_batch, plan, spec, with_equal_prompts

CPU = torch.device("cpu")

BATCHES = [replace(with_equal_prompts(seed=seed), logprob_samples=(0, 3, 8)) for seed in range(2)]
CUTS: dict[int, Any] = {  # by data-parallel ranks; of one rank the second has too few tokens for two, the last has none
    1: [[[0, 1, 3, 4, 7], [2], [5, 6, 8], []]],
    2: [[[0, 1, 3], [6, 8]], [[2, 4, 5, 7], []]],
}
TWO_STEPS: dict[int, Any] = {
    1: ([[[0, 1, 3, 4, 7], [2]]], [[[6, 8], [5]]]),
    2: ([[[0, 1, 3], []], [[2, 4], [7]]], [[[6, 8]], [[5]]]),
}
"""Other micro-batches, of two optimiser steps."""
POLICY = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
DISTILLED = {"opd_kl_coef": 0.5, "opd_direction": "forward"}
# Where `adam_eps` is given: with that of `case_spec`, Adam would divide the rounding errors of small gradients by
# themselves, and the second rollout begins with its weights.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algo": {**POLICY, "use_tis": True}},
    "whole_prompts": {
        "algo": {**POLICY, "calculate_per_token_loss": True, "opd_kl": "top_k", "opd_top_k": 3, **DISTILLED},
        "share_prompts": False,
        "log_probs_chunk_size": 8,
        "teacher": True,
    },
    "gspo": {"algo": {**POLICY, "advantage_estimator": "gspo", "use_rollout_logprobs": True, "opsm_delta": 0.05}},
    "whole_rollout": {
        "algo": {
            "advantage_estimator": "reinforce_plus_plus",
            "normalize_advantages": True,
            "kl_coef": 0.5,
            "kl_loss_type": "k2",
            "gamma": 0.9,
            "use_tis": True,
            "tis_type": "mis",
            "mis": MisConfig(level=MisLevel.geometric, normalize=True, veto=0.05),
            "use_rollout_entropy": True,
        }
    },
    "recomputed": {
        "algo": {**POLICY, "opd_kl": "full", **DISTILLED},
        "teacher": True,
        "gradient_checkpointing": True,
        "reuse_logprobs": False,
        "log_probs_chunk_size": 8,
        "adam_eps": 1e-2,
    },
    "critic": {
        "algo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "lambd": 0.9, "normalize_advantages": True},
        "critic": True,
    },
    "lora": {"algo": POLICY, "lora": LoraConfig(rank=4, alpha=8)},
    "muon": {"algo": POLICY, "name": OptimizerName.muon, "muon_momentum": 0.0, "matrix_lr": 0.02, "lr": 1e-3},
    "moving": {
        "algo": {"advantage_estimator": "ppo", "kl_coef": 0.1},
        "critic": True,
        "offload": OffloadSpec(mode=OffloadMode.move),
    },
    "experts": {"algo": POLICY, "experts": True, "adam_eps": 1e-2},
    "engine_routes": {"algo": {**POLICY, "use_rollout_routing_replay": True}, "experts": True, "adam_eps": 1e-2},
    "policy_routes": {
        "algo": {**POLICY, "use_routing_replay": True},
        "experts": True,
        "adam_eps": 1e-2,
        "gradient_checkpointing": True,
    },
    "bfloat16": {"algo": POLICY, "dtype": ComputeDtype.bfloat16},
}
EXACT = [name for name in CASES if name != "bfloat16"]


WORLDS = {2: {1: ["policy_routes"], 2: list(CASES)}, 4: {2: ["whole_rollout"], 4: ["gspo"]}}
"""Cases by number of ranks and by number of ranks that share a sample."""


def case_spec(name: str, model_path: str, *, context_size: int = 1) -> TrainerSpec:
    """A spec without clipping and first moment: `exp_avg`, or Muon's buffer, is the gradient. One rank shares nothing.

    The model with experts is in the folder `experts` next to the dense one.
    """
    changes = {"clip_grad": 0.0, "adam_beta1": 0.0, "adam_eps": 1e-4, **CASES[name]}
    if context_size == 1:
        changes["share_prompts"] = False
    other = str(Path(model_path).with_name("experts"))
    if changes.pop("experts", False):
        model_path = other
    if changes.pop("teacher", False):
        changes["teacher"] = ModelSource(path=other)
    if changes.pop("critic", False):
        changes["critic"] = CriticSpec(source=ModelSource(path=model_path), lr=1e-2)
    return spec(model_path, ref_path=model_path, context_parallel_size=context_size, **changes)


def with_routes(batch: TrainBatch) -> TrainBatch:
    """Adds two of four experts at random in each of two layers; equal prompts of all samples but one have the same."""
    scores = np.random.default_rng(int(batch.tokens.sum())).random((len(batch.tokens), 2, 4))
    routes = np.argsort(scores, axis=-1)[..., :2].astype(np.uint8)
    for i, first in enumerate(PROMPT_OF):
        start, source, length = int(batch.offsets[i]), int(batch.offsets[first]), int(batch.prompt_lens[i])
        if i != 1:
            routes[start : start + length] = routes[source : source + length]
    return replace(batch, routes=routes)


def train_rollouts(backend: FsdpBackend, batches: list[TrainBatch], *, num_data_ranks: int) -> list[dict[str, Any]]:
    """Trains and returns metrics and requested logprobs of each rollout."""
    algo = backend._spec.algo
    cuts = TWO_STEPS[num_data_ranks] if algo.use_routing_replay else [CUTS[num_data_ranks]]
    batches = [with_routes(batch) if algo.use_rollout_routing_replay else batch for batch in batches]
    results = [backend.train(batch, [plan(batch, cut) for cut in cuts]) for batch in batches]
    return [
        {
            "numbers": {**result.steps[-1], **result.metrics},
            "requested": {str(i): values.tolist() for i, values in result.logprobs.items()},
        }
        for result in results
    ]


def rank_main(rank: int, world_size: int, port: int, model_path: str, folder: Path) -> None:
    join_world(rank, world_size, "127.0.0.1", port, "gloo", 60.0)
    errors = {str(window): attention_error(window=window) for window in (None, 3, 20)}
    (folder / f"attention_{world_size}_{rank}.json").write_text(json.dumps(errors))
    for context_size, names in WORLDS[world_size].items():
        for name in names:
            report = one_case(name, rank, world_size, context_size, model_path, folder)
            (folder / f"{name}_{world_size}_{context_size}_{rank}.json").write_text(json.dumps(report))


def one_case(name: str, rank: int, world_size: int, context_size: int, model_path: str, folder: Path) -> dict[str, Any]:
    """Trains and saves after the first rollout; gspo also resumes from there."""
    case, num_data_ranks = case_spec(name, model_path, context_size=context_size), world_size // context_size
    backend = FsdpBackend(case, rank=rank, world_size=world_size)
    saved = folder / f"{name}_{world_size}_{context_size}"
    if rank == 0:
        saved.mkdir()
    dist.barrier()
    first = train_rollouts(backend, BATCHES[:1], num_data_ranks=num_data_ranks)
    backend.save(saved)
    second = train_rollouts(backend, BATCHES[1:], num_data_ranks=num_data_ranks)
    backend.export_hf(saved / "hf")
    weights = dict(backend.weights())
    if rank == 0:
        save_file(weights, saved / "final.safetensors")
    report: dict[str, Any] = {"rollouts": [*first, *second]}
    if name == "gspo":
        resumed = FsdpBackend(case, rank=rank, world_size=world_size)
        resumed.load(saved)
        again = train_rollouts(resumed, BATCHES[1:], num_data_ranks=num_data_ranks)
        same = all(torch.equal(weight, weights[key]) for key, weight in resumed.weights())
        report["resumed_exactly"] = again == second and same
    return report


def attention_error(*, window: int | None) -> float:
    """Largest difference of results and gradients from packed attention, over the rows of this rank.

    Of float64 values, whose sums of exponentials are float32: sums of float32 values differ between CPUs by 2e-6.
    """
    context = RankGrid.from_context_size(CPU, context_size=dist.get_world_size()).context
    assert context is not None
    batch = make_batch(RAGGED)
    batch = replace(batch, tokens=np.arange(len(batch.tokens), dtype=np.int32))  # a number for each row
    share = pack_share(batch, range(len(RAGGED)), device=CPU, context=context)
    generator = torch.Generator().manual_seed(0)
    # Columns by row of the batch, the same on every rank: packed rows select from them by token id.
    heads = {"q": 4, "k": 2, "v": 2, "grad": 4}
    columns = {
        name: torch.randn(len(batch.tokens), number, 8, generator=generator, dtype=torch.float64)
        for name, number in heads.items()
    }
    results = []
    for attend, micro in (
        (packed_attention, pack(batch, range(len(RAGGED)), device=CPU)),
        (context_attention, share),
    ):
        rows = micro.input_ids[0]
        q, k, v = (columns[name][rows].transpose(0, 1)[None].requires_grad_() for name in "qkv")
        out, _ = attend(nn.Identity(), q, k, v, None, packing=micro.packing, sliding_window=window)
        out.backward(columns["grad"][rows][None])
        found = [out.detach()[0], *(x.grad[0].transpose(0, 1) for x in (q, k, v))]
        results.append(
            [
                torch.zeros_like(columns["grad"][:, :1]).expand(-1, each.shape[1], -1).index_copy(0, rows, each)
                for each in found
            ]
        )
    own = share.input_ids[0]
    return max(float((a[own] - b[own]).abs().max()) for a, b in zip(*results, strict=True))


def fork(run: Callable[[], None]) -> int:
    """Runs a function in a child process and returns its id; the child exits with 1 where the function raises."""
    child = os.fork()
    if child:
        return child
    try:
        run()
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    # Threads of torch.distributed sometimes abort the interpreter at exit.
    os._exit(0)


def main(model_path: str, folder: Path, ports: list[int]) -> int:
    for world_size, port in zip(WORLDS, ports, strict=True):
        ranks = {fork(partial(rank_main, rank, world_size, port, model_path, folder)) for rank in range(world_size)}
        while ranks:
            child, status = os.wait()
            ranks.discard(child)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]))
