"""Program of the four ranks of `test_megatron_transfer.py`.

python -m tests.ranks.training.megatron_transfer_ranks <rank> <port> <folder of the models> <for reports> <engines>

Engines are URLs: two accept every format of weights, one accepts packed buckets only, one dies at its first bucket.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.config import MegatronConfig, ModelConfig
from rlscale.errors import WeightSyncError
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.export import write_weights
from rlscale.training.megatron.hf_mapping.export_hf import Exporter
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.megatron_model import MegatronModel, build_model
from rlscale.training.megatron.parallel_dims import build_parallel_dims
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.exchange import P2P
from rlscale.types import EngineAddress
from tests.ranks.training.megatron_model_ranks import CP, EP, ETP, PP, SP, TP, round_trips
from tests.ranks.training.megatron_push_ranks import (
    DISK,
    GROUP,
    arrives,
    one_engine_dies,
    one_owner_fails,
    open_channel,
    owners_of,
)

NUM_RANKS = 4
SMALL_BUCKET = 3000  # bytes: gives several rounds, and some weights are larger
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2 pp2, tied": ("qwen3_tied", {TP: 2, PP: 2}),
    "tp2 dp2": ("llama", {TP: 2}),
    "tp2 cp2": ("glm4", {TP: 2, CP: 2}),
    "vpp2 dp2": ("qwen3_deep", {PP: 2, "core_args": {"virtual_pipeline_model_parallel_size": 2}}),
    "ep4": ("qwen3_moe", {EP: 4}),
    "ep2 pp2": ("qwen3_moe", {EP: 2, PP: 2}),
    "tp2 ep4": ("qwen3_moe_mixed", {TP: 2, EP: 4, "core_args": {**SP, ETP: 1}}),
    "tp2 ep2 etp2": ("qwen3_moe", {TP: 2, EP: 2, "core_args": {**SP, ETP: 2}}),
    "cp2 ep2": ("qwen3_moe", {CP: 2, EP: 2}),
    "tp2 ep2, latent": ("deepseek_v3", {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}}),
}

PUSHED = {"ep4": "group", "ep2 pp2": "packed", "tp2 ep4": "group", "tp2 ep2 etp2": "disk", "cp2 ep2": "packed"}
"""Transport to the engines, by the name of the case."""


class FlippingP2P(P2P):
    """Changes one bit of the third message that a rank sends."""

    def __init__(self) -> None:
        self.num_sent = 0

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, tag: int) -> list[dist.Work]:
        for flat in sends.values():
            self.num_sent += 1
            if self.num_sent == 3:
                flat[5] ^= 4
        return super().start(sends, receives, tag=tag)


def built(family: str, sizes: Mapping[str, Any], root: Path) -> MegatronModel:
    megatron = MegatronConfig(**sizes)
    build_parallel_dims(megatron, seed=1)
    path = str(root / family)
    model = build_model(
        path, model=ModelConfig(use_hf_config_for_megatron=True), megatron=megatron, dtype=torch.float32
    )
    load_hf(model, path)
    return model


def corrupted_message_error(model: MegatronModel, *, rank: int) -> tuple[str, int]:
    """The error of each rank when a message of rank 2 arrives changed, and the number of weights received before."""
    exporter = Exporter(model, bucket_bytes=SMALL_BUCKET, p2p=FlippingP2P() if rank == 2 else None)
    number = 0
    try:
        for _ in exporter.weights():
            number += 1
    except WeightSyncError as error:
        return str(error), number
    return "", number


def written_by_all(model: MegatronModel, source: Path, folder: Path, *, rank: int) -> dict[str, Any]:
    """Contents of a folder that all ranks write because its weights do not fit in one file."""
    target = folder / "written"
    if rank == 0:
        target.mkdir()
    written = write_weights(model, target, max_file_bytes=10 * SMALL_BUCKET)
    before, after = HfCheckpoint(str(source)), HfCheckpoint(str(target))
    return {
        "same": before.files.keys() == after.files.keys()
        and all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files),
        "writers": sum(bool(each.files) for each in written),
        "names": sorted(path.name for path in target.iterdir()),
    }


def pushed(
    model: MegatronModel, path: str, how: str, *, engines: list[EngineAddress], rank: int, folder: Path
) -> dict[str, Any]:
    """Pushes weights from their owners to engines; see `arrives`."""
    exporter, some = owners_of(model), engines[1:3] if how == "packed" else engines[:2]
    channel = open_channel(DISK if how == "disk" else GROUP, rank=rank, senders=exporter.senders, folder=folder)
    return arrives(channel, exporter, path, some)


def main(rank: int, port: int, root: Path, folder: Path, urls: list[str]) -> None:
    engines = [EngineAddress(name=f"engine {i}", url=url) for i, url in enumerate(urls)]
    join_world(rank, NUM_RANKS, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name, (family, sizes) in CASES.items():
            model = built(family, sizes, root)
            path = str(root / family)
            report[name] = {to: round_trips(model, path, bucket_bytes=SMALL_BUCKET, to=to) for to in WeightOwners}
            if name in PUSHED:
                report[f"{name}, pushed"] = pushed(model, path, PUSHED[name], engines=engines, rank=rank, folder=folder)
            if name == "ep4":
                options = {"rank": rank, "folder": folder}
                report["owner"] = one_owner_fails(owners_of(model), path, engines[:2], **options)
                report["engine"] = one_engine_dies(owners_of(model), path, [engines[0], engines[3]], **options)
        report["files"] = written_by_all(
            built("qwen3_moe", {EP: 2, PP: 2}, root), root / "qwen3_moe", folder, rank=rank
        )
        report["changed"], report["before"] = corrupted_message_error(built("qwen3", {PP: 2}, root), rank=rank)
        again = built("qwen3", {PP: 2}, root)
        report["afterwards"] = round_trips(again, str(root / "qwen3"))
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5]))
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
