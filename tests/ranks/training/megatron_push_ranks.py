"""Weight sync from four ranks to engines, each weight from a rank that holds it; used by `megatron_transfer_ranks`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.config import WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError, WeightSyncError
from rlscale.training.megatron.hf_mapping.export_hf import Exporter
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from rlscale.training.spec import WeightOwners
from rlscale.types import EngineAddress
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.sync import WeightSync

TIMEOUT_S = 100.0
BUCKET_BYTES = 3000
GROUP, DISK, DELTA = WeightChannelName.process_group, WeightChannelName.disk, WeightChannelName.delta

Weights = Iterator[tuple[str, Tensor]]


def open_channel(name: WeightChannelName, *, rank: int, senders: Sequence[int], folder: Path) -> WeightSync:
    spec = ChannelSpec(
        name=name,
        backend="gloo",
        device="cpu",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        folder=folder / "weights",
        model_folder=folder / "none",
    )
    return make_channel(spec, make_engine=_client, rank=rank, senders=senders)


def arrives(channel: WeightSync, exporter: Any, path: str, engines: Sequence[EngineAddress]) -> dict[str, Any]:
    """Pushes twice. Returns bytes by sender and, on rank 0, whether all engines hold the weights of the folder."""
    checkpoint = HfCheckpoint(path)
    expected = {name: checksum(checkpoint.tensor(name)) for name in checkpoint.files}
    channel.connect(engines)
    reports = [channel.push(exporter.weights(), version) for version in (1, 2)]
    held = [_checksums(engine) for engine in engines] if dist.get_rank() == 0 else []
    channel.close()
    num_bytes = sum(checkpoint.tensor(name).nbytes for name in checkpoint.files)
    return {
        "senders": list(exporter.senders),
        "own_bytes": sum(tensor.nbytes for _, tensor in exporter.weights()),
        "all_bytes": num_bytes,
        "reported": [report.num_bytes for report in reports],
        "same": all({name: found[name] for name in expected} == expected for found in held),
    }


def one_owner_fails(
    exporter: Any, path: str, engines: Sequence[EngineAddress], *, rank: int, folder: Path
) -> dict[str, Any]:
    """The error of each rank when the weight iterator of one owner fails, and the result of the next push."""
    channel = open_channel(GROUP, rank=rank, senders=exporter.senders, folder=folder)
    channel.connect(engines)
    victim = exporter.senders[-1]
    failing = _FailsOnce(exporter.weights()) if rank == victim else exporter.weights()
    return {
        "victim": victim,
        "error": _push(channel, failing),
        "unconnected": _push(channel, exporter.weights()),
        "afterwards": arrives(channel, exporter, path, engines),
    }


def one_engine_dies(
    exporter: Any, path: str, engines: Sequence[EngineAddress], *, rank: int, folder: Path
) -> dict[str, Any]:
    """The error of each rank when the last engine dies at the first bucket, and the result of a push without it."""
    channel = open_channel(GROUP, rank=rank, senders=exporter.senders, folder=folder)
    channel.connect(engines)
    return {
        "error": _push(channel, exporter.weights()),
        "afterwards": arrives(channel, exporter, path, engines[:-1]),
        "reconnect_error": _connect(channel, engines),
    }


def owners_of(model: Any) -> Exporter:
    return Exporter(model, to=WeightOwners.owners, bucket_bytes=BUCKET_BYTES)


class _FailsOnce:
    """Weights whose second item cannot be had; afterwards the others can, as the ranks that need shards require."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._number = weights, 0

    def __iter__(self) -> Weights:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        self._number += 1
        if self._number == 2:
            raise RuntimeError("no memory left")
        return next(self._weights)


def _push(channel: WeightSync, weights: Weights) -> str:
    try:
        channel.push(weights, 1)
    except (EngineError, WeightSyncError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _connect(channel: WeightSync, engines: Sequence[EngineAddress]) -> str:
    try:
        channel.connect(engines)
    except EngineError as error:
        return str(error)
    return ""


def _client(address: EngineAddress) -> HttpEngine:
    return HttpEngine(address, timeout_s=TIMEOUT_S)


def _checksums(address: EngineAddress) -> dict[str, str]:
    async def ask() -> dict[str, str]:
        engine = _client(address)
        try:
            return dict((await engine.checksums())[0].checksums)
        finally:
            await engine.close()

    return asyncio.run(ask())
