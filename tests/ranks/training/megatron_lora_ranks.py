"""Program of the two trainer ranks of `test_megatron_lora.py`, which compares adapters of both backends.

python -m tests.ranks.training.megatron_lora_ranks <rank> <port> <dense> <with experts> <latent> <fused>
    <other dense> <sinks> <linear attention by head> <by part> <folder> <kind>
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
from safetensors.torch import load_file

from rlscale.config import LoraConfig, LoraSync, MegatronConfig, OptimizerName, QkvFormat
from rlscale.errors import DataError
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf
from rlscale.training.roles import TrainerRank
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

DENSE, EXPERTS, LATENT, FUSED, OTHER, SINKS, BY_HEAD, BY_PART = range(8)
SEQUENCES = {"sequence_parallel": True}
MUON = {"name": OptimizerName.muon, "lr": 1e-3, "matrix_lr": 0.02}
ROWS = {"qkv_format": QkvFormat.bshd}  # transformers packs no samples of linear attention
DIVIDED = {**SEQUENCES, "expert_tensor_parallel_size": 1}
SAVED_AFTER = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with adapters and a parallel layout as in `megatron_ranks.Mode`."""

    model: int = DENSE
    targets: list[str] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: int | None = None  # another model; None: the base
    converts: bool = False  # the checkpoint is converted
    resumes_on: str | None = None  # case with other sizes that continues from the checkpoint
    is_slow: bool = False

    @property
    def config(self) -> MegatronConfig:
        return MegatronConfig(**{SHORT.get(k, k): v for k, v in self.sizes.items()}, core_args=dict(self.more))

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=4, alpha=8, target_modules=self.targets, sync=LoraSync.adapter)


CASES: dict[str, Case] = {
    "tp2, sequence-parallel": Case(sizes={"tp": 2}, more=SEQUENCES, resumes_on="pp2"),
    "pp2": Case(sizes={"pp": 2}, converts=True),
    "tp2": Case(sizes={"tp": 2}, is_slow=True),
    "dp2": Case(is_slow=True),
    "another reference": Case(sizes={"pp": 2}, reference=OTHER, is_slow=True),
    "some layers, recomputed": Case(
        targets=["k_proj", "up_proj", "o_proj"],
        sizes={"tp": 2, "recompute_granularity": "full"},
        more=SEQUENCES,
        is_slow=True,
    ),
    "whole optimiser on each": Case(sizes={"use_distributed_optimizer": False}, is_slow=True),
    "muon": Case(sizes={"tp": 2}, settings=MUON, is_slow=True),
    "experts": Case(model=EXPERTS, sizes={"tp": 2}, more={**SEQUENCES, "expert_tensor_parallel_size": 2}, is_slow=True),
    "latent": Case(model=LATENT, sizes={"tp": 2}, more={**SEQUENCES, "expert_tensor_parallel_size": 2}, is_slow=True),
    "gate and up in one tensor, norms after": Case(model=FUSED, sizes={"tp": 2}, resumes_on="fused, dp2", is_slow=True),
    "fused, dp2": Case(model=FUSED, is_slow=True),
    "sinks": Case(model=SINKS, sizes={"tp": 2, "ep": 2}, more=DIVIDED, resumes_on="sinks, pp2", is_slow=True),
    "sinks, pp2": Case(model=SINKS, sizes={"pp": 2}, is_slow=True),
    "linear attention by head": Case(
        model=BY_HEAD, sizes={"tp": 2, "ep": 2}, more=DIVIDED, settings=ROWS, resumes_on="by head, pp2", is_slow=True
    ),
    "by head, pp2": Case(model=BY_HEAD, sizes={"pp": 2}, settings=ROWS, is_slow=True),
    "linear attention by part": Case(model=BY_PART, sizes={"tp": 2}, settings=ROWS, resumes_on="by part, cp2"),
    "by part, cp2": Case(model=BY_PART, sizes={"cp": 2}, settings=ROWS, is_slow=True),
}


def specs(case: Case, models: Sequence[str]) -> tuple[TrainerSpec, TrainerSpec]:
    """The same run on FSDP2 and on Megatron-core."""
    settings, path = {**case.settings, "lora": case.lora}, models[case.model]
    reference = models[case.model if case.reference is None else case.reference]
    theirs, ours = full_spec(path, **settings), megatron_spec(path, case.config, **settings)
    return replace(theirs, ref_path=reference), replace(ours, ref_path=reference)


def sent_adapters(backend: TrainerRank) -> dict[str, torch.Tensor]:
    """The adapters that engines get, on every rank."""
    assert backend.adapters is not None
    found = [{name: tensor.clone() for name, tensor in backend.adapters.weights()}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of tensors with the same names."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def compare(case: Case, models: Sequence[str], folder: Path, *, rank: int) -> dict[str, Any]:
    """Three steps on both backends; those of Megatron-core are saved, exported and continued."""
    theirs, ours = specs(case, models)
    fsdp = FsdpBackend(theirs, rank=rank, world_size=2)
    start = sent_adapters(fsdp)
    expected = TrainingRun.from_backend(fsdp, num_data_ranks=2)
    first, shares = MegatronBackend(ours, rank=rank, world_size=2), data_ranks(ours.megatron)
    before, steps = weights_of(first), []
    report: dict[str, Any] = {"start": distance(sent_adapters(first), start)}
    for i, batch in enumerate(BATCHES):
        if i == SAVED_AFTER:
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            first.save(folder)
            saved = weights_of(first)
        steps.append(train(first, batch, shares))
    run, adapters = TrainingRun(steps=steps, weights=weights_of(first)), sent_adapters(first)
    assert first.adapters is not None
    base = {name: weight.clone() for name, weight in first.adapters.base_weights()}
    first.export_hf(folder / "hf")
    fsdp.export_hf(folder / "fsdp")
    report |= {
        "difference": difference(run, expected),
        "changed": sorted(name for name, weight in run.weights.items() if not torch.equal(weight, before[name])),
        "base": all(torch.equal(weight, before[name]) for name, weight in base.items()) and (rank or len(base)) > 0,
        "adapters": distance(adapters, sent_adapters(fsdp)),
        "exported": distance(load_file(folder / "hf" / "adapter" / "adapter_model.safetensors"), adapters),
        "trained": len([p for _, p in first.policy.model.named_parameters() if p.requires_grad]),
        "state": sum(len(part.optimizer.state) for part in first.policy.trainable.optimizer.chained_optimizers),
    }
    first.close()
    report["resumed"] = continued(ours, folder, rank=rank) == {"step": steps[SAVED_AFTER], "weights": 0.0}
    if case.resumes_on is not None:
        _, other = specs(CASES[case.resumes_on], models)
        report["resharded"] = continued(other, folder, rank=rank)["weights"]
    if case.converts:
        target = folder / "converted"
        convert_to_hf(folder, target, model=ours.model_path, sizes=ours.megatron, dtype=torch.float32)
        dist.barrier()
        report["converted"] = distance(load_file(target / "model.safetensors"), saved)
        report["without adapters"] = start_error(ours, folder, rank=rank)
    return report


def continued(spec: TrainerSpec, folder: Path, *, rank: int) -> dict[str, Any]:
    """The step after a checkpoint, and the largest difference of its weights to those that were exported then."""
    backend = MegatronBackend(spec, rank=rank, world_size=2)
    backend.load(folder)
    step = train(backend, BATCHES[SAVED_AFTER], data_ranks(spec.megatron))
    found = weights_of(backend)
    backend.close()
    exported = load_file(folder / "hf" / "model.safetensors")
    return {"step": step, "weights": distance(found, exported)}


def start_error(spec: TrainerSpec, folder: Path, *, rank: int) -> str:
    """The message of a run without adapters that starts with the weights of a checkpoint that has some."""
    plain = replace(spec, train=replace(spec.train, lora=LoraConfig()), start_weights=folder)
    try:
        MegatronBackend(plain, rank=rank, world_size=2).close()
    except DataError as error:
        return str(error)
    return "no error"


def main(rank: int, port: int, models: Sequence[str], folder: Path, kind: str) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.is_slow == (kind == "slow"):
            report[name] = compare(case, models, folder / name, rank=rank)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:11], Path(sys.argv[11]), sys.argv[12])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
