"""Memory of a trainer rank in an optimiser step, measured by torch's profiler. Started by `memory_model.py`.

    python memory_probe.py '<case as JSON>' RANK NUM_RANKS PORT

Steady memory is that of weights, optimiser state and reference. The memory of a step is the largest difference between
allocated and freed bytes since the step started.
"""

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rlscale.config import RunConfig, load_config, uses_reference
from rlscale.data.microbatch_plan import plan_steps
from rlscale.models.resolve_model import cache_root, resolve_model
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import TrainerSpec
from rlscale.types import TrainBatch

REPLAY = "debug.load_rollout_data='{rollout_id}.jsonl'"
"""Replay disables generation, because the embedded engine does not support every family."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, by its command-line overrides, and the lengths of all its samples."""

    name: str
    overrides: Sequence[str]
    prompt: int
    response: int
    family: str | None = None  # `model_type` of a model that rlscale does not build itself
    hf_fields: Mapping[str, Any] = field(default_factory=dict)  # its config.json

    def config(self) -> RunConfig:
        base = ["experiment=quickstart", "model.warmup_experiment=null", "eval.stop_reward=null"]
        limits = [f"rollout.max_prompt_len={self.prompt}", f"rollout.max_response_len={self.response}"]
        model = ["model.max_position_embeddings=4096"]
        if self.family is not None:
            model = ["model=hf", f"model.hf_checkpoint={self._folder()}", "debug.train_only=true", REPLAY]
        return load_config([*base, *model, *limits, *self.overrides])

    def _folder(self) -> Path:
        """Folder of the model, which is written once with random weights."""
        key = hashlib.sha256(json.dumps([self.family, self.hf_fields], sort_keys=True).encode()).hexdigest()[:12]
        folder = cache_root(None) / "memory_model" / f"{self.family}-{key}"
        if not (folder / "config.json").exists():
            assert self.family is not None
            AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **self.hf_fields)).save_pretrained(
                folder
            )
        return folder


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory of one rank in bytes."""

    weights: int
    optimizer: int
    reference: int
    step: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.reference + self.step


def measure(case: Case, *, rank: int = 0, num_ranks: int = 1) -> Measured:
    """Trains twice and profiles the second step, when the optimiser has its state. The caller has joined the world."""
    config = case.config()
    path = resolve_model(config.model)
    backend = FsdpBackend(make_spec(config, path), rank=rank, world_size=num_ranks)
    batch = make_batch(config, case)
    context_ranks = config.fsdp.context_parallel_size
    steps = plan_steps(batch, config.batch, num_ranks=num_ranks // context_ranks, context_ranks=context_ranks)
    backend.train(batch, steps)
    gc.collect()
    step = peak_bytes(lambda: backend.train(batch, steps))
    reference = [] if backend.reference is None else backend.reference.model.parameters()
    states = (state for per_weight in backend.policy.optimizer.state.values() for state in per_weight.values())
    return Measured(
        weights=held(backend.policy.model.parameters()),
        optimizer=held(states),
        reference=held(reference),
        step=step,
    )


def make_spec(config: RunConfig, path: str) -> TrainerSpec:
    return TrainerSpec(
        model_path=path,
        train=config.train,
        fsdp=config.fsdp,
        optim=config.optim,
        algo=config.algo,
        temperature=config.rollout.temperature,
        max_response_len=config.rollout.max_response_len,
        total_steps=10,
        device="cpu",
        ref_path=path if uses_reference(config.algo) else None,
    )


def make_batch(config: RunConfig, case: Case) -> TrainBatch:
    """Samples of equal length with different prompts."""
    number = config.batch.rollout_batch_size * config.batch.n_samples_per_prompt
    length = case.prompt + case.response
    random = np.random.default_rng(0)
    mask = np.tile(np.arange(length) >= case.prompt, number).astype(np.uint8)
    return TrainBatch(
        tokens=random.integers(0, 90, number * length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        offsets=np.arange(number + 1, dtype=np.int64) * length,
        prompt_lens=np.full(number, case.prompt, np.int32),
        rewards=random.random(number).astype(np.float32),
        group_ids=np.arange(number, dtype=np.int64) // config.batch.n_samples_per_prompt,
        trajectory_ids=np.arange(number, dtype=np.int64),
        version=0,
    )


def held(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    """Bytes of the storages of tensors; of a sharded tensor, those of this rank."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    memory: Mapping[int, int] = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(memory.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest number of bytes that `run` holds at a time, from the profiler's record of allocations and releases."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def main() -> None:
    case, rank, num_ranks, port = Case(**json.loads(sys.argv[1])), *map(int, sys.argv[2:5])
    torch.manual_seed(0)
    # Before the ranks join: in a world transformers lets only one rank write the model.
    resolve_model(case.config().model)
    join_world(rank, num_ranks, "127.0.0.1", port, "gloo", 120.0)
    measured = measure(case, rank=rank, num_ranks=num_ranks)
    leave_world()
    sys.stdout.write(json.dumps(vars(measured)) + "\n")


if __name__ == "__main__":
    main()
