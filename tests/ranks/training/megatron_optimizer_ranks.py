"""Program of the two trainer ranks of `test_megatron_optimizers.py`, which compares both backends.

python -m tests.ranks.training.megatron_optimizer_ranks <rank> <port> <dense> <with experts> <untied> <latent>
    <sinks> <linear attention> <folder> <kind>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlscale.config import MegatronConfig, OptimizerName, QkvFormat
from rlscale.errors import ConfigError
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.spec import TrainerSpec
from tests.ranks.training.fsdp_ranks import full_spec
from tests.ranks.training.megatron_ranks import (
    BATCHES,
    SHORT,
    TrainingRun,
    data_ranks,
    difference,
    megatron_spec,
    train,
    weights_of,
)

# Untied, so that embedding and output layer have different rates.
DENSE, EXPERTS, UNTIED, LATENT, SINKS, DELTA = range(6)
RATES = {"lr": 1e-2, "matrix_lr": 3e-3, "embedding_lr": 2e-2, "unembedding_lr": 4e-3}
MUON = {"name": OptimizerName.muon, "weight_decay": 0.1, "lr": 1e-3, "matrix_lr": 0.02}
ROWS = {**MUON, "qkv_format": QkvFormat.bshd}  # transformers packs no samples of linear attention
DIVIDED = {"sequence_parallel": True, "expert_tensor_parallel_size": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of `optim` and `train`, and a parallel layout as in `megatron_ranks.Mode`."""

    model: int = DENSE
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    is_slow: bool = False

    @property
    def config(self) -> MegatronConfig:
        return MegatronConfig(**{SHORT.get(k, k): v for k, v in self.sizes.items()}, core_args=dict(self.more))


CASES: dict[str, Case] = {
    "last stage only": Case(settings={"only_train_params": [r"model\.norm"]}, sizes={"pp": 2}),
    "frozen, recomputed": Case(
        settings={"freeze_params": ["embed_tokens", r"layers\.0\."]}, sizes={"recompute_granularity": "full"}
    ),
    "frozen tied table": Case(settings={"freeze_params": ["embed"]}, sizes={"pp": 2}, is_slow=True),
    "experts only": Case(model=EXPERTS, settings={"only_train_params": ["experts"]}, sizes={"ep": 2}),
    "rates": Case(model=UNTIED, settings=RATES, sizes={"pp": 2}),
    "rates, tied": Case(settings=RATES, sizes={"tp": 2}, is_slow=True),
    "muon": Case(model=UNTIED, settings=MUON, sizes={"tp": 2}),
    "muon, shards of experts": Case(
        model=EXPERTS,
        settings=MUON,
        sizes={"tp": 2},
        more={"sequence_parallel": True, "expert_tensor_parallel_size": 2},
        is_slow=True,
    ),
    "muon, experts": Case(model=EXPERTS, settings=MUON, sizes={"ep": 2}),
    "muon, latent": Case(model=LATENT, settings=MUON, sizes={"pp": 2}, is_slow=True),
    "muon, sinks": Case(model=SINKS, settings=MUON, sizes={"ep": 2}, is_slow=True),
    "muon, linear attention": Case(model=DELTA, settings=ROWS, sizes={"tp": 2, "ep": 2}, more=DIVIDED),
    "muon, frozen": Case(settings={**MUON, "freeze_params": ["embed", "norm"]}, sizes={"pp": 2}, is_slow=True),
}
SAVED_AFTER = 2


def specs(case: Case, path: str) -> tuple[TrainerSpec, TrainerSpec]:
    """The same run on FSDP2 and on Megatron-core."""
    ours = megatron_spec(path, case.config, **case.settings)
    return full_spec(path, **case.settings), ours


def compare(case: Case, path: str, folder: Path, *, rank: int) -> dict[str, Any]:
    """Three steps on both backends; those of Megatron-core are saved and continued, with another rate as well."""
    theirs, ours = specs(case, path)
    expected = TrainingRun.from_backend(FsdpBackend(theirs, rank=rank, world_size=2), num_data_ranks=2)
    first, shares = MegatronBackend(ours, rank=rank, world_size=2), data_ranks(ours.megatron)
    before, steps = weights_of(first), []
    for i, batch in enumerate(BATCHES):
        if i == SAVED_AFTER:
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            first.save(folder)
        steps.append(train(first, batch, shares))
    run = TrainingRun(steps=steps, weights=weights_of(first))
    first.close()
    second = MegatronBackend(ours, rank=rank, world_size=2)
    second.load(folder)
    is_same = train(second, BATCHES[SAVED_AFTER], shares) == steps[SAVED_AFTER]
    loaded = weights_of(second)
    second.close()
    return {
        "difference": difference(run, expected),
        "changed": sorted(name for name, weight in run.weights.items() if not torch.equal(weight, before[name])),
        "resumed": is_same and all(torch.equal(loaded[name], weight) for name, weight in run.weights.items()),
    }


def changed_rate(spec: TrainerSpec, folder: Path, *, rank: int) -> float:
    """Largest change of the embedding in the step after a checkpoint, with its rate set to 0 in between."""
    changed = replace(spec, optim=replace(spec.optim, embedding_lr=0.0))
    backend = MegatronBackend(changed, rank=rank, world_size=2)
    backend.load(folder)
    name = "model.embed_tokens.weight"
    before = weights_of(backend)[name]
    train(backend, BATCHES[SAVED_AFTER], data_ranks(spec.megatron))
    after = weights_of(backend)[name]
    backend.close()
    return float((after - before).abs().max())


def error_of(spec: TrainerSpec, *, rank: int) -> str:
    """The message of a backend that cannot be built."""
    try:
        MegatronBackend(spec, rank=rank, world_size=2).close()
    except ConfigError as error:
        return str(error)
    finally:
        MegatronBackend(replace(spec, train=replace(spec.train, freeze_params=None)), rank=rank, world_size=2).close()
    return "no error"


def main(rank: int, port: int, models: Sequence[str], folder: Path, kind: str) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    is_slow = kind == "slow"
    report: dict[str, Any] = {"cases": {}}
    for name, case in CASES.items():
        if case.is_slow == is_slow:
            report["cases"][name] = compare(case, models[case.model], folder / name, rank=rank)
    if not is_slow:
        _, spec = specs(CASES["rates"], models[UNTIED])
        report["changed rate"] = changed_rate(spec, folder / "rates", rank=rank)
        parts = megatron_spec(models[DENSE], MegatronConfig(), freeze_params=["q_proj"])
        report["part of a parameter"] = error_of(parts, rank=rank)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:9], Path(sys.argv[9]), sys.argv[10])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
