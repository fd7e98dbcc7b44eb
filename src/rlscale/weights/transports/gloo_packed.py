"""The trainer's end of a weight channel over process groups: one with each engine, or one with all over nccl.

trainer rank 0                                       every engine
  for each bucket: announce    ── HTTP ──────────>   joins the broadcast
                   broadcast   ══ gloo / nccl ══>    compares checksums, writes
                   wait        <── HTTP ──────────   200, or which tensor is wrong

Engines on a CPU that know how get tensors as they lie in memory (see blocks); SGLang and GPUs one packed buffer a
bucket. Of several trainer ranks that send (see shares) each has groups of its own with the engines, of which it is
rank 0, as SGLang takes broadcasts from rank 0 alone.
"""

import itertools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import WeightBucket, WeightGroup, WeightVersion
from rlscale.weights.buckets import Named, PackedBucket, Staging, cut, layout_of, pack
from rlscale.weights.engine_rpc import in_thread
from rlscale.weights.multi_sender import SendReport, ShareChannel
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import MakeEngine, Weights
from rlscale.weights.torch_groups import Group, join_group, leave_group, open_store, start_broadcast
from rlscale.weights.transports.gloo_blocks import LOAD_FORMAT as BLOCKS
from rlscale.weights.transports.gloo_blocks import BlockSender

NUM_LINKS = 4

STAGED_BYTES = 64 * 2**20
"""Largest bucket over gloo: packing one, sending another and checking a third go on at once."""


class ProcessGroupChannel(ShareChannel):
    """Sends weights to engines over process groups, checked tensor by tensor. See ShareChannel.

    After an error the groups cannot be used again: `connect` makes new ones.

    Args:
        bucket_bytes: most bytes of one broadcast (a larger tensor has one of its own).
        backend: "gloo" | "nccl".
        master_address: an address of this rank's machine that the engines can reach.

    Example:
        channel = ProcessGroupChannel(make_engine=..., team=SenderGroup(rank=0), bucket_bytes=2**29, backend="gloo",
                                      timeout_s=60, master_address="127.0.0.1")
        channel.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:30000")])
        channel.push(backend.weights(), version=1)
        channel.close()
    """

    def __init__(
        self,
        *,
        make_engine: MakeEngine,
        team: SenderGroup,
        bucket_bytes: int,
        backend: str,
        timeout_s: float,
        master_address: str = "127.0.0.1",
    ) -> None:
        super().__init__(make_engine=make_engine, team=team, timeout_s=timeout_s)
        self._backend, self._master_address, self._bucket_bytes = backend, master_address, bucket_bytes
        self._joined: _Joined | None = None

    @property
    def _in_one_group(self) -> bool:
        """Whether all engines are in one group with a sender.

        gloo passes a broadcast on from member to member and cannot be interrupted: in one group with an engine that
        dies the others would wait for their bytes until the timeout. nccl's pay only in one group; but two engines that
        take the buckets of two senders in different orders would wait for each other.
        """
        return self._backend == "nccl" and self._team.is_one

    @property
    def _in_blocks(self) -> bool:
        return self._backend == "gloo" and not self._engines_by_format(BLOCKS)[1]

    def _open(self) -> None:
        store = open_store(self._master_address, timeout_s=self._timeout_s)
        engines = self._calls.engines
        circles = [engines] if self._in_one_group else [[engine] for engine in engines]
        joining = [self._join(circle, store) for circle in circles]
        for joined in joining:
            self._calls.settle([*joined.calls, joined.own])
        groups = [joined.own.result() for joined in joining]
        names = [joined.group.name for joined in joining for _ in joined.calls]
        self._joined = _Joined(group_names=names, process_groups=groups, store=store, way=self._make_way(groups))

    def _join(self, engines: Sequence[Engine], store: TCPStore) -> "_Joining":
        num_ranks = [engine.address.num_ranks for engine in engines]
        group = WeightGroup(
            name=f"rlscale-{uuid.uuid4().hex}",
            master_address=self._master_address,
            master_port=store.port,
            world_size=1 + sum(num_ranks),
            backend=self._backend,
            timeout_s=self._timeout_s,
            num_links=NUM_LINKS if self._in_blocks else 1,
        )
        first_ranks = itertools.accumulate(num_ranks[:-1], initial=1)
        calls = [
            self._calls.start(engine.join_weight_group(group, rank))
            for engine, rank in zip(engines, first_ranks, strict=True)
        ]
        # In a thread of its own: when an engine refuses, nobody waits for the group that cannot come about.
        own = in_thread(lambda: join_group(group, 0, store=store))
        return _Joining(group=group, calls=calls, own=own)

    def _make_way(self, process_groups: Sequence[Group]) -> "PackedTransport | BlockTransport":
        if self._in_blocks:
            return BlockTransport([BlockSender(group) for group in process_groups])
        return PackedTransport(process_groups, on_gpu=self._backend == "nccl")

    def _start(self, version: WeightVersion) -> None:
        self._pause()
        self._calls.on_all(lambda engine: engine.begin_weight_update())

    def _send(self, weights: Weights, version: WeightVersion) -> SendReport:
        link = self._joined
        assert link is not None, "a connected channel has its groups"
        num_buckets = num_bytes = 0
        in_flight: _InFlight | None = None
        for named in cut(weights, link.way.limit(self._bucket_bytes)):
            # Prepared, and before that gathered, while the last bucket travels.
            ready = link.way.prepare(named)
            if in_flight is not None:
                self._settle(in_flight)
            in_flight = self._dispatch(ready, link, version)
            num_buckets, num_bytes = num_buckets + 1, num_bytes + sum(tensor.nbytes for _, tensor in named)
        if in_flight is not None:
            self._settle(in_flight)
        return SendReport(num_buckets=num_buckets, num_bytes=num_bytes)

    def _finish(self, version: WeightVersion, shares: Sequence[SendReport]) -> None:
        self._calls.on_all(lambda engine: engine.end_weight_update(version))
        self._verify_and_resume(version)

    def _dispatch(self, ready: "_Ready", link: "_Joined", version: WeightVersion) -> "_InFlight":
        calls = [
            self._calls.start(engine.receive_bucket(ready.bucket, group_name=name, version=version))
            for engine, name in zip(self._calls.engines, link.group_names, strict=True)
        ]
        return _InFlight(ready=ready, calls=calls, sent=ready.send())

    def _settle(self, in_flight: "_InFlight") -> None:
        # First the engines' answers: one that refuses never joins the broadcast, which would then only time out.
        self._calls.settle(in_flight.calls)
        self._calls.settle(in_flight.sent.under_way)
        try:
            in_flight.sent.wait()
        except RuntimeError as e:
            raise WeightSyncError(f"the broadcast of {in_flight.ready.bucket.names[0]} failed: {e}") from e

    def _abandon(self) -> None:
        # What is under way to the other engines gets there meanwhile; each is free again after its bucket. A group is
        # left, and forgotten, only when nothing is under way in it any more, which only a thread can wait for.
        link, self._joined = self._joined, None
        if link is not None:
            in_thread(link.leave)

    def _shut(self) -> None:
        link, self._joined = self._joined, None
        if link is None:
            return
        leaving = [
            self._calls.start(engine.leave_weight_group(name))
            for engine, name in zip(self._calls.engines, link.group_names, strict=True)
        ]
        self._try_all(leaving, "leave its weight group")
        link.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A bucket on its way: its bytes have left once nothing is `under_way` and `wait` has returned."""

    under_way: Sequence["Future[None]"] = ()
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A bucket that can leave at once; `send` keeps its bytes while they travel."""

    bucket: WeightBucket
    send: Callable[[], Sent]


class PackedTransport:
    """Bytes end to end in one buffer, with checksums announced."""

    def __init__(self, process_groups: Sequence[Group], *, on_gpu: bool) -> None:
        self._process_groups, self._on_gpu = process_groups, on_gpu
        self._staging = itertools.cycle((Staging(), Staging()))  # one travels while the other is filled

    def limit(self, bucket_bytes: int) -> int:
        return bucket_bytes if self._on_gpu else min(bucket_bytes, STAGED_BYTES)

    def prepare(self, named: Sequence[Named]) -> _Ready:
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        packed = pack(named, device, staging=next(self._staging))
        return _Ready(bucket=packed.bucket, send=lambda: self._send(packed))

    def _send(self, packed: PackedBucket) -> Sent:
        works = [start_broadcast(group, packed.flat) for group in self._process_groups]
        return Sent(wait=lambda: [work.wait() for work in works])


class BlockTransport:
    """Tensors as they lie in memory, each in pieces, with the digests of their blocks behind."""

    def __init__(self, senders: Sequence[BlockSender]) -> None:
        self._senders = senders

    def limit(self, bucket_bytes: int) -> int:
        return bucket_bytes

    def prepare(self, named: Sequence[Named]) -> _Ready:
        bucket = replace(layout_of(named), load_format=BLOCKS)
        tensors = [tensor for _, tensor in named]
        return _Ready(bucket=bucket, send=lambda: self._send(tensors))

    def _send(self, tensors: Sequence[Tensor]) -> Sent:
        # A thread for each engine: none waits for another.
        return Sent(under_way=[in_thread(partial(sender.send, tensors)) for sender in self._senders])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joining:
    """A group that is coming about."""

    group: WeightGroup
    calls: Sequence["Future[None]"]
    own: "Future[Group]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    group_names: Sequence[str]  # of each engine
    process_groups: Sequence[Group]
    store: TCPStore  # lives as long as the groups: engines may still read from it
    way: PackedTransport | BlockTransport

    def leave(self) -> None:
        for group in self.process_groups:
            leave_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    ready: _Ready
    calls: list["Future[None]"]
    sent: Sent
