"""Program of the two ranks of `test_megatron_delta.py`.

python -m tests.ranks.training.megatron_delta_ranks <rank> <port> <folder of the models> <folder for reports> <case>...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlscale.config import MegatronConfig, ModelConfig
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.model.cpu_patches import megatron_device
from tests.ranks.training.fsdp_ranks import full_spec
from tests.ranks.training.megatron_model_ranks import CP, EP, ETP, PP, SP, TP, Case, conversion_round_trips
from tests.ranks.training.megatron_ranks import BATCHES, cut, data_ranks
from tests.unit.training.rollouts import plan

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, rows": {},
    "tp2": {TP: 2},
    "tp2 sp": {TP: 2, "core_args": SP},
    "tp2 sp, recomputed": {TP: 2, "recompute_granularity": "full", "core_args": SP},
    "cp2": {CP: 2},
    "cp2, rows": {CP: 2},
    "pp2": {PP: 2},
    "vpp2": {PP: 2, "core_args": {"virtual_pipeline_model_parallel_size": 2}},
    "ep2": {EP: 2},
    "tp2 sp etp2": {TP: 2, "core_args": {**SP, ETP: 2}},
    "tp2 sp ep2": {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}},
}
_EXPERT_LAYOUTS = ("dp2", "dp2, rows", "cp2", "pp2", "ep2", "tp2 sp etp2", "tp2 sp ep2")
_DENSE_LAYOUTS = ("dp2", "dp2, rows", "cp2", "cp2, rows", "tp2", "tp2 sp", "tp2 sp, recomputed", "pp2")
FAMILIES = {
    "qwen3_next": _EXPERT_LAYOUTS,
    "qwen3_next_mixed": ("pp2", "vpp2", "tp2 sp ep2"),
    "qwen3_5": _DENSE_LAYOUTS,
    "qwen3_5_one_key": ("tp2", "tp2 sp", "pp2"),
    "qwen3_5_moe": _EXPERT_LAYOUTS,
}
TRAINED = ("qwen3_5 tp2", "qwen3_5 cp2", "qwen3_5 dp2", "qwen3_5 tp2 sp", "qwen3_next ep2", "qwen3_next tp2 sp etp2")
"""Cases whose steps are compared, and continued from a checkpoint."""

CASES = {f"{family} {layout}": (family, layout) for family, layouts in FAMILIES.items() for layout in layouts}


def trained(name: str, root: Path, folder: Path, *, rank: int) -> dict[str, Any]:
    """Metrics of a first step, and whether a run continues bitwise from its checkpoint and exports its weights."""
    family, layout = CASES[name]
    model = ModelConfig(use_hf_config_for_megatron=True)
    made = full_spec(str(root / family), megatron=MegatronConfig(**LAYOUTS[layout]), model=model)
    batch, steps = BATCHES[0], [plan(BATCHES[0], cut(data_ranks(made.megatron)))]

    def step(backend: MegatronBackend) -> tuple[dict[str, float], dict[str, Tensor]]:
        metrics = backend.train(batch, steps).steps[0]
        return dict(metrics), {each: weight.clone() for each, weight in backend.weights()}

    first = MegatronBackend(made, rank=rank, world_size=2)
    metrics, _ = step(first)
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    first.save(folder)
    numbers, weights = step(first)
    first.close()
    second = MegatronBackend(made, rank=rank, world_size=2)
    second.load(folder)
    again, same = step(second)
    second.close()
    return {
        "metrics": {each: metrics[each] for each in ("loss", "grad_norm")},
        "resumed": numbers == again and all(torch.equal(same[each], weight) for each, weight in weights.items()),
    }


def main(rank: int, port: int, root: Path, folder: Path, names: list[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name in names:
            family, layout = CASES[name]
            case = Case(family, LAYOUTS[layout], root, is_row=layout.endswith("rows"))
            report[name] = {"exported": case.export_equals_folder(), **case.run()}
            parallel_state.destroy_model_parallel()
    for name in (each for each in names if each in TRAINED):
        report[name] |= trained(name, root, folder / name, rank=rank)
    with megatron_device():
        for family in dict.fromkeys(CASES[name][0] for name in names):
            report[family] = conversion_round_trips(family, root, folder)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
