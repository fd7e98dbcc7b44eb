"""Memory of a trainer rank on Megatron-core, measured by torch's profiler. Started by `megatron_memory.py`.

    python megatron_memory_probe.py '<case as JSON>' RANK NUM_RANKS PORT

Measures the same as `memory_probe.py`, and the memory that a weight sync and a checkpoint allocate. Gradients count as
part of the step, though Megatron-core keeps their memory.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from memory_probe import Case, held, make_batch, make_spec, peak_bytes
from torch import Tensor

from rlscale.data.microbatch_plan import plan_steps
from rlscale.driver.trainer_spec import weight_owners
from rlscale.models.resolve_model import resolve_model
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.training.distributed import join_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.optim import gradient_buffers, optimizer_tensors


@dataclass(frozen=True, kw_only=True)
class MegatronMeasured:
    """Bytes of one rank: the steady ones, and the additional peak of three phases."""

    weights: int
    optimizer: int
    reference: int
    step: int
    sync: int
    save: int

    @property
    def steady(self) -> int:
        return self.weights + self.optimizer + self.reference


def measure(case: Case, *, rank: int, num_ranks: int) -> MegatronMeasured:
    """Trains twice, the second time under the profiler, then gathers the weights and saves. The world is there."""
    config = case.config()
    spec = make_spec(config, resolve_model(config.model))
    spec = replace(spec, megatron=config.megatron, model=config.model, weight_owners=weight_owners(config))
    backend = MegatronBackend(spec, rank=rank, world_size=num_ranks)
    batch, parallel = make_batch(config, case), ParallelSizes.from_config(config.megatron, num_ranks)
    steps = plan_steps(batch, config.batch, num_ranks=parallel.data, context_ranks=parallel.context)
    backend.train(batch, steps)
    gc.collect()
    trainable = backend.policy.trainable
    weights = [tensor for chunk in backend.policy.model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    gradients = held(gradient_buffers(trainable.chunks))
    step = peak_bytes(lambda: backend.train(batch, steps)) + gradients
    gc.collect()
    sync = peak_bytes(lambda: _drain(backend.weights()))
    gc.collect()
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder, src=0)
        # Twice: sometimes gloo still holds buffers of the previous gather.
        save = max(peak_bytes(partial(_save, backend, Path(folder[0]) / str(i))) for i in range(2))
    return MegatronMeasured(
        weights=held(weights),
        optimizer=held(list(optimizer_tensors(trainable.optimizer, exclude=weights))),
        reference=0 if backend.reference is None else held(_copies(backend)),
        step=step,
        sync=sync + gradients,
        save=save + gradients,
    )


def _copies(backend: MegatronBackend) -> Iterable[Tensor]:
    """Tensors of the reference in host memory."""
    assert backend.reference is not None and backend.reference.frozen.weights is not None, "it borrows the policy's"
    return backend.reference.frozen.weights.tensors


def _save(backend: MegatronBackend, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)


def _drain(weights: Iterable[object]) -> None:
    for _ in weights:
        pass


def main() -> None:
    case, rank, num_ranks, port = Case(**json.loads(sys.argv[1])), *map(int, sys.argv[2:5])
    resolve_model(case.config().model)
    join_world(rank, num_ranks, "127.0.0.1", port, "gloo", 120.0)
    sys.stdout.write(json.dumps(vars(measure(case, rank=rank, num_ranks=num_ranks))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed sometimes abort an interpreter that shuts down


if __name__ == "__main__":
    main()
