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

from rlscale.architectures.family import names_with
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.model.cpu_patches import megatron_device
from tests.ranks.training.megatron_families import NEWER
from tests.ranks.training.megatron_model_ranks import (
    CP,
    EP,
    ETP,
    PP,
    SP,
    TP,
    Case,
    bridge_agrees,
    conversion_round_trips,
)
from tests.ranks.training.megatron_mtp import MtpCase, train_frozen_and_trained
from tests.ranks.training.megatron_sinks import train_with_sinks

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2, "core_args": {**SP, ETP: 2}},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2},
    "tp2 ep2": {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}},
}
SINKS: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("pp2", "cp2", "ep2", "tp2 ep2")},
    "dp2": {},
    "dp2, rows": {},
    "cp2, rows": {CP: 2},
    "pp2, recomputed": {PP: 2, "recompute_granularity": "full"},
}
"""Layouts of gpt-oss. Its experts have biases, which tensor-parallel ranks cannot divide."""

DENSE, NIGHTLY = ("mimo", "mistral"), ("mimo", "mistral", "mixtral", "moonlight")
CASES = {
    f"{family} {layout}": (family, layout)
    for family in NEWER
    for layout in LAYOUTS
    if family != "gpt_oss" and (family not in DENSE or "ep2" not in layout)
} | {f"gpt_oss {layout}": ("gpt_oss", layout) for layout in SINKS}
COMBINED = tuple(name for name, (family, layout) in CASES.items() if layout == "tp2 ep2" and family not in NIGHTLY)
"""The cases that are compared on every change: tensor and expert parallelism at once. Those of `NIGHTLY` have the
layers of families that other tests compare."""

INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
MTP_CASES = {
    f"mtp {model} {layout}": MtpCase(model=model, sizes=sizes)
    for model in ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo")
    for layout, sizes in LAYOUTS.items()
    if model != "mimo" or "ep2" not in layout
} | {
    "mtp mimo cp2, padded": MtpCase(model="mimo", sizes={CP: 2}, is_padded=True),
    "mtp glm4_moe dp2, padded": MtpCase(model="glm4_moe", sizes={}, is_padded=True),
    "mtp glm4_moe dp2, recomputed": MtpCase(model="glm4_moe", sizes={"recompute_granularity": "full"}),
    "mtp mimo pp2, one length": MtpCase(model="mimo", sizes={PP: 2, "variable_seq_lengths": False, "seq_length": 96}),
    "mtp mimo_deep pp2, interleaved": MtpCase(model="mimo_deep", sizes={PP: 2, "core_args": INTERLEAVED}),
}
COMBINED_MTP = ("mtp glm4_moe tp2 ep2", "mtp deepseek_v3 cp2")
"""The same with layers for multi-token prediction."""

TRAINED = "mtp trained"
TRAINED_SINKS = {
    "trained gpt_oss tp2 ep2": ("tp2 ep2", "pp2"),
    "trained gpt_oss pp2": ("pp2", "dp2"),
    "trained gpt_oss cp2": ("cp2", "dp2"),
}
"""Layout of a run, and the one that continues from its checkpoint."""


def main(rank: int, port: int, root: Path, folder: Path, names: list[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name in (each for each in names if each in CASES):
            family, layout = CASES[name]
            sizes = SINKS[layout] if family == "gpt_oss" else LAYOUTS[layout]
            case = Case(family, sizes, root, is_row=layout.endswith("rows"))
            report[name] = {"exported": case.export_equals_folder(), **case.run()}
            if case.model.architecture.family in names_with("bridge"):
                report[name]["bridged"] = bridge_agrees(case.path, sizes)
            parallel_state.destroy_model_parallel()
        for family in dict.fromkeys(CASES[name][0] for name in names if name in CASES):
            report[family] = conversion_round_trips(family, root, folder)
    for name in (each for each in names if each in TRAINED_SINKS):
        own, other = (SINKS[layout] for layout in TRAINED_SINKS[name])
        report[name] = train_with_sinks(str(root / "gpt_oss"), own, folder / name, others=other)
    for name in (each for each in names if each in MTP_CASES):
        report[name] = MTP_CASES[name].compare(root / "mtp", folder / name)
    if TRAINED in names:
        report[TRAINED] = train_frozen_and_trained(root / "mtp", folder)
        with megatron_device():
            report[TRAINED]["converted"] = conversion_round_trips("glm4_moe", root / "mtp", folder / "converted")
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
