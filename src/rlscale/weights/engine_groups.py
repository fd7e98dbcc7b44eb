"""Process groups between one sending trainer rank and the engines, and the pipeline of buckets through them.

sender                                               every engine
  for each bucket: announce    ── HTTP ──────────>   joins the broadcast
                   broadcast   ══ gloo / nccl ══>    compares checksums, writes
                   wait        <── HTTP ──────────   200, or the tensor that is wrong

Each of several senders has its own groups with the engines. It is rank 0 of each, as SGLang receives broadcasts from
rank 0 alone.
"""

import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import WeightVersion
from rlscale.weight_types import WeightBucket, WeightGroup
from rlscale.weights.buckets import Named
from rlscale.weights.engine_rpc import EngineRpc, run_in_thread
from rlscale.weights.torch_groups import Group, join_group, leave_group, open_store
from rlscale.weights.transport import SendReport


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Settings of the transports over process groups.

    Args:
        bucket_bytes: max bytes of one bucket (a larger tensor has its own bucket).
        timeout_s: of joining a group and of every broadcast.
        master_address: an address of this rank's machine that the engines can reach.
    """

    bucket_bytes: int
    timeout_s: float
    master_address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBroadcast:
    """A bucket in transfer: its bytes have left once all `threads` are done and `wait` has returned."""

    threads: Sequence["Future[None]"] = ()
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBucket:
    """A bucket that can leave at once; `send` keeps its bytes alive during the transfer."""

    bucket: WeightBucket
    send: Callable[[], PendingBroadcast]


class EngineGroups:
    """The groups of one sender. A group that failed cannot be used again: `open` makes new ones.

    Args:
        backend: "gloo" | "nccl".
        num_links: connections of a gloo group to each member.
        in_one_group: all engines are members of one group. False: each engine has its own group.
    """

    def __init__(self, options: GroupOptions, *, backend: str, num_links: int = 1, in_one_group: bool = False) -> None:
        self._options, self._backend, self._num_links, self._in_one_group = options, backend, num_links, in_one_group
        self._link: _Link | None = None

    @property
    def names(self) -> Sequence[str]:
        """The name of each engine's group."""
        return self._open_link.names

    @property
    def process_groups(self) -> Sequence[Group]:
        return self._open_link.process_groups

    @property
    def _open_link(self) -> "_Link":
        assert self._link is not None, "groups are opened before they are used"
        return self._link

    def open(self, rpc: EngineRpc) -> None:
        """Creates the groups; returns once all engines have joined."""
        store = open_store(self._options.master_address, timeout_s=self._options.timeout_s)
        members = [rpc.engines] if self._in_one_group else [[engine] for engine in rpc.engines]
        joining = [self._join(rpc, engines, store) for engines in members]
        for each in joining:
            rpc.wait_all([*each.calls, each.own])
        self._link = _Link(
            rpc=rpc,
            names=[each.group.name for each in joining for _ in each.calls],
            process_groups=[each.own.result() for each in joining],
            store=store,
        )

    def send(
        self, buckets: Iterable[list[Named]], prepare: Callable[[list[Named]], ReadyBucket], version: WeightVersion
    ) -> SendReport:
        """Sends buckets one after the other; the next one is prepared while one is in transfer."""
        link = self._open_link
        num_buckets = num_bytes = 0
        in_flight: _InFlight | None = None
        for named in buckets:
            # The iterator gathers the next bucket, and `prepare` packs it, before the last one is waited for.
            ready = prepare(named)
            if in_flight is not None:
                in_flight.wait(link.rpc)
            in_flight = _InFlight.start(ready, link, version)
            num_buckets, num_bytes = num_buckets + 1, num_bytes + sum(tensor.nbytes for _, tensor in named)
        if in_flight is not None:
            in_flight.wait(link.rpc)
        return SendReport(num_buckets=num_buckets, num_bytes=num_bytes)

    def close(self) -> None:
        """Leaves the groups on both sides; logs engines that do not answer."""
        link, self._link = self._link, None
        if link is None:
            return
        leaving = [
            link.rpc.start(engine.leave_weight_group(name))
            for engine, name in zip(link.rpc.engines, link.names, strict=True)
        ]
        link.rpc.try_all(leaving, "leave its weight group")
        link.leave()

    def abort(self) -> None:
        """Leaves the groups on this side only, without waiting."""
        # Buckets in transfer to the other engines still arrive; each engine is free after its bucket. A group can be
        # left and destroyed only when nothing is in transfer in it, so a thread waits for that.
        link, self._link = self._link, None
        if link is not None:
            run_in_thread(link.leave)

    def _join(self, rpc: EngineRpc, engines: Sequence[Engine], store: TCPStore) -> "_Joining":
        num_ranks = [engine.address.num_ranks for engine in engines]
        group = WeightGroup(
            name=f"rlscale-{uuid.uuid4().hex}",
            master_address=self._options.master_address,
            master_port=store.port,
            world_size=1 + sum(num_ranks),
            backend=self._backend,
            timeout_s=self._options.timeout_s,
            num_links=self._num_links,
        )
        # The sender is rank 0; the ranks of engine i follow those of engine i - 1.
        first_ranks = itertools.accumulate(num_ranks[:-1], initial=1)
        calls = [
            rpc.start(engine.join_weight_group(group, rank)) for engine, rank in zip(engines, first_ranks, strict=True)
        ]
        # In its own thread: if an engine refuses, this rank does not wait for a group that cannot be completed.
        own = run_in_thread(lambda: join_group(group, 0, store=store))
        return _Joining(group=group, calls=calls, own=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joining:
    """A group whose members are joining."""

    group: WeightGroup
    calls: Sequence["Future[None]"]
    own: "Future[Group]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """The open groups with all engines."""

    rpc: EngineRpc
    names: Sequence[str]  # of each engine's group
    process_groups: Sequence[Group]
    store: TCPStore  # must live as long as the groups: engines may still read from it

    def leave(self) -> None:
        for group in self.process_groups:
            leave_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A bucket that was announced to all engines and is in transfer."""

    ready: ReadyBucket
    calls: list["Future[None]"]
    broadcast: PendingBroadcast

    @classmethod
    def start(cls, ready: ReadyBucket, link: _Link, version: WeightVersion) -> "_InFlight":
        calls = [
            link.rpc.start(engine.receive_bucket(ready.bucket, group_name=name, version=version))
            for engine, name in zip(link.rpc.engines, link.names, strict=True)
        ]
        return cls(ready=ready, calls=calls, broadcast=ready.send())

    def wait(self, rpc: EngineRpc) -> None:
        # The engines' answers first: an engine that refuses never joins the broadcast, which would only time out.
        rpc.wait_all(self.calls)
        rpc.wait_all(self.broadcast.threads)
        try:
            self.broadcast.wait()
        except RuntimeError as e:
            raise WeightSyncError(f"the broadcast of {self.ready.bucket.names[0]} failed: {e}") from e
