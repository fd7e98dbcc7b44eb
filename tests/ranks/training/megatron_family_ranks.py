"""Program of the two ranks of `test_megatron_families.py`.

python -m tests.ranks.training.megatron_family_ranks <rank> <port> <folder of the models> <folder for reports> <case>...
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
from tests.ranks.training.megatron_families import NEWER
from tests.ranks.training.megatron_model_ranks import CP, EP, ETP, PP, SP, TP, Case, conversion_round_trips

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2, "core_args": {**SP, ETP: 2}},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2},
    "tp2 ep2": {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}},
}
CASES = {f"{family} {layout}": (family, layout) for family in NEWER for layout in LAYOUTS}
COMBINED = tuple(name for name, (_, layout) in CASES.items() if layout == "tp2 ep2")
"""The cases that are compared on every change: tensor and expert parallelism at once."""


def main(rank: int, port: int, root: Path, folder: Path, names: list[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name in names:
            family, layout = CASES[name]
            case = Case(family, LAYOUTS[layout], root)
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
