"""The trainer's end of a weight channel over process groups.

trainer rank 0                                       every engine
  for each bucket: announce    ── HTTP ──────────>   joins the broadcast
                   broadcast   ══ gloo / nccl ══>    compares checksums, writes
                   wait        <── HTTP ──────────   200, or which tensor is wrong
"""

import itertools
import uuid
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlscale.errors import WeightSyncError
from rlscale.types import WeightGroup, WeightVersion
from rlscale.weights.buckets import PackedBucket, Staging, cut, pack
from rlscale.weights.calls import in_thread
from rlscale.weights.channel import EngineChannel, MakeEngine, Weights
from rlscale.weights.group import join_group, leave_group, open_store, start_broadcast

STAGED_BYTES = 64 * 2**20
"""Largest bucket over gloo: packing one, sending another and checking a third go on at once."""


class ProcessGroupChannel(EngineChannel):
    """Sends weights to engines over one process group, checked tensor by tensor. See EngineChannel.

    After an error the group cannot be used again: `connect` makes a new one.

    Args:
        bucket_bytes: most bytes of one broadcast (a larger tensor has one of its own).
        backend: "gloo" | "nccl".
        master_address: an address of rank 0's machine that the engines can reach.

    Example:
        channel = ProcessGroupChannel(make_engine=..., rank=0, bucket_bytes=2**29, backend="gloo", timeout_s=60,
                                      master_address="127.0.0.1")
        channel.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:30000")])
        channel.push(backend.weights(), version=1)
        channel.close()
    """

    def __init__(
        self,
        *,
        make_engine: MakeEngine,
        rank: int,
        bucket_bytes: int,
        backend: str,
        timeout_s: float,
        master_address: str = "127.0.0.1",
    ) -> None:
        super().__init__(make_engine=make_engine, rank=rank, timeout_s=timeout_s)
        self._backend, self._master_address = backend, master_address
        self._bucket_bytes = bucket_bytes if backend == "nccl" else min(bucket_bytes, STAGED_BYTES)
        self._link: _Link | None = None

    def _open(self) -> None:
        store = open_store(self._master_address, timeout_s=self._timeout_s)
        addresses = [engine.address for engine in self._calls.engines]
        group = WeightGroup(
            name=f"rlscale-{uuid.uuid4().hex}",
            master_address=self._master_address,
            master_port=store.port,
            world_size=1 + sum(address.num_ranks for address in addresses),
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        first_ranks = itertools.accumulate((address.num_ranks for address in addresses[:-1]), initial=1)
        joins = [
            self._calls.start(engine.join_weight_group(group, rank))
            for engine, rank in zip(self._calls.engines, first_ranks, strict=True)
        ]
        # In a thread of its own: when an engine refuses, nobody waits for the group that cannot come about.
        own = in_thread(lambda: join_group(group, 0, store=store))
        self._calls.settle([*joins, own])
        self._link = _Link(group=group, process_group=own.result(), store=store, staging=(Staging(), Staging()))

    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        link = self._link
        assert link is not None, "a connected channel has its group"
        device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")
        num_buckets = num_bytes = 0
        with self._paused(version):
            self._calls.on_all(lambda engine: engine.begin_weight_update())
            in_flight: _InFlight | None = None
            for named in cut(weights, self._bucket_bytes):
                # Packed, and before that gathered, while the last bucket travels.
                packed = pack(named, device, staging=link.staging[num_buckets % 2])
                if in_flight is not None:
                    self._finish(in_flight)
                in_flight = self._send(packed, link, version)
                num_buckets, num_bytes = num_buckets + 1, num_bytes + packed.flat.nbytes
            if in_flight is not None:
                self._finish(in_flight)
            self._calls.on_all(lambda engine: engine.end_weight_update(version))
        return num_buckets, num_bytes

    def _send(self, packed: PackedBucket, link: "_Link", version: WeightVersion) -> "_InFlight":
        calls = self._calls.start_all(
            lambda engine: engine.receive_bucket(packed.bucket, group_name=link.group.name, version=version)
        )
        return _InFlight(packed=packed, calls=calls, work=self._broadcast(link.process_group, packed))

    def _broadcast(self, process_group: dist.ProcessGroup, packed: PackedBucket) -> dist.Work:
        return start_broadcast(process_group, packed.flat)

    def _finish(self, in_flight: "_InFlight") -> None:
        # First the engines' answers: one that refuses never joins the broadcast, which would then only time out.
        self._calls.settle(in_flight.calls)
        try:
            in_flight.work.wait()
        except RuntimeError as e:
            raise WeightSyncError(f"the broadcast of {in_flight.packed.bucket.names[0]} failed: {e}") from e

    def _abandon(self) -> None:
        # Leaving a group that hangs can wait for its timeout, which only a thread can afford.
        link, self._link = self._link, None
        if link is not None:
            in_thread(lambda: leave_group(link.process_group))

    def _shut(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._try_all(lambda engine: engine.leave_weight_group(link.group.name), "leave its weight group")
            leave_group(link.process_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    group: WeightGroup
    process_group: dist.ProcessGroup
    store: TCPStore  # lives as long as the group: engines may still read from it
    staging: tuple[Staging, Staging]  # in turn: one travels while the other is filled


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    packed: PackedBucket  # keeps the bytes while they travel
    calls: list["Future[None]"]
    work: dist.Work
