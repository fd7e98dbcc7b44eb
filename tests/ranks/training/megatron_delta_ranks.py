"""Program of the two ranks of `test_megatron_delta.py`.

python -m tests.ranks.training.megatron_delta_ranks <rank> <port> <folder of the models> <folder for reports> <case>...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.model.cpu_patches import megatron_device
from tests.ranks.training.megatron_model_ranks import EP, ETP, PP, SP, TP, Case, conversion_round_trips

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, rows": {},
    "tp2": {TP: 2},
    "tp2 sp": {TP: 2, "core_args": SP},
    "tp2 sp, recomputed": {TP: 2, "recompute_granularity": "full", "core_args": SP},
    "pp2": {PP: 2},
    "vpp2": {PP: 2, "core_args": {"virtual_pipeline_model_parallel_size": 2}},
    "ep2": {EP: 2},
    "tp2 sp etp2": {TP: 2, "core_args": {**SP, ETP: 2}},
    "tp2 sp ep2": {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}},
}
_EXPERT_LAYOUTS = ("dp2", "dp2, rows", "pp2", "ep2", "tp2 sp etp2", "tp2 sp ep2")
_DENSE_LAYOUTS = ("dp2", "dp2, rows", "tp2", "tp2 sp", "tp2 sp, recomputed", "pp2")
FAMILIES = {
    "qwen3_next": _EXPERT_LAYOUTS,
    "qwen3_next_mixed": ("pp2", "vpp2", "tp2 sp ep2"),
    "qwen3_5": _DENSE_LAYOUTS,
    "qwen3_5_one_key": ("tp2", "tp2 sp", "pp2"),
    "qwen3_5_moe": _EXPERT_LAYOUTS,
}
CASES = {f"{family} {layout}": (family, layout) for family, layouts in FAMILIES.items() for layout in layouts}


def main(rank: int, port: int, root: Path, folder: Path, names: list[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name in names:
            family, layout = CASES[name]
            case = Case(family, LAYOUTS[layout], root, is_row=layout.endswith("rows"))
            report[name] = {"exported": case.export_equals_folder(), **case.run()}
            parallel_state.destroy_model_parallel()
        for family in dict.fromkeys(CASES[name][0] for name in names):
            report[family] = conversion_round_trips(family, root, folder)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
