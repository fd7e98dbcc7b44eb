"""The trainer's end of a weight channel over process groups.

    trainer rank 0                                       every engine
      pause, flush, begin          ── HTTP ──────────>   stops decoding
      for each bucket: announce    ── HTTP ──────────>   joins the broadcast
                       broadcast   ══ gloo / nccl ══>    compares checksums, writes
                       wait        <── HTTP ──────────   200, or which tensor is wrong
      end, set version             ── HTTP ──────────>
      read version back            <── HTTP ──────────   must be the one just sent
      resume                       ── HTTP ──────────>

The other trainer ranks only take part in gathering the weights.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import EngineAddress, WeightGroup, WeightSyncReport, WeightVersion
from rlscale.weights.buckets import PackedBucket, cut, pack
from rlscale.weights.group import join_group, leave_group, open_store, start_broadcast

log = logging.getLogger(__name__)

T = TypeVar("T")
GRACE_S = 5.0  # what a call may take beyond the timeout of the group, whose error says more


class ProcessGroupChannel:
    """Sends weights to engines over one process group, checked tensor by tensor. Every rank calls every method.

    After an error the group cannot be used again: `connect` makes a new one.

    Args:
        make_engine: gives the client of an engine; used on rank 0 only.
        rank: of this trainer.
        bucket_bytes: most bytes of one broadcast (a larger tensor has one of its own).
        backend: "gloo" | "nccl".
        timeout_s: of every single step, on both sides.
        master_address: an address of rank 0's machine that the engines can reach.

    Example:
        channel = ProcessGroupChannel(make_engine=..., rank=0, bucket_bytes=2**29, backend="gloo", timeout_s=60,
                                      master_address="127.0.0.1")
        channel.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:30000")])
        channel.push(backend.weights(), version=1)
        channel.close()
    """

    pause_mode = "retract"

    def __init__(
        self,
        *,
        make_engine: Callable[[EngineAddress], Engine],
        rank: int,
        bucket_bytes: int,
        backend: str,
        timeout_s: float,
        master_address: str = "127.0.0.1",
    ) -> None:
        self._make_engine, self._rank = make_engine, rank
        self._bucket_bytes, self._backend, self._timeout_s = bucket_bytes, backend, timeout_s
        self._master_address = master_address
        self._calls = _Calls()
        self._engines: list[Engine] = []
        self._link: _Link | None = None

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Joins a new group with all engines, in place of an earlier one.

        Raises EngineError or WeightSyncError naming the engine that did not join.
        """
        if self._rank != 0:
            return
        self._disconnect()
        self._engines = [self._make_engine(address) for address in engines]
        store = open_store(self._master_address, timeout_s=self._timeout_s)
        group = WeightGroup(
            name=f"rlscale-{uuid.uuid4().hex}",
            master_address=self._master_address,
            master_port=store.port,
            world_size=1 + sum(address.num_ranks for address in engines),
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        joins, rank = [], 1
        for engine in self._engines:
            joins.append(self._calls.start(engine.join_weight_group(group, rank)))
            rank += engine.address.num_ranks
        # In a thread of its own: when an engine refuses, nobody waits for the group that cannot come about.
        own = _in_thread(lambda: join_group(group, 0, store=store))
        self._settle([*joins, own])
        self._link = _Link(group=group, process_group=own.result(), store=store)

    def push(self, weights: Iterator[tuple[str, Tensor]], version: WeightVersion) -> WeightSyncReport:
        """Sends all weights and then the version, and reads the version back from every engine.

        Raises:
            WeightSyncError: a tensor arrived changed, or an engine does not hold `version`; the message names it.
            EngineError: an engine failed or did not answer in time; the message names it.
        """
        started = time.perf_counter()
        num_buckets = num_bytes = 0
        if self._rank != 0:
            for _ in weights:
                pass
        else:
            try:
                num_buckets, num_bytes = self._push(weights, version)
            except BaseException:
                self._abandon()
                raise
        seconds = time.perf_counter() - started
        return WeightSyncReport(version=version, num_buckets=num_buckets, num_bytes=num_bytes, seconds=seconds)

    def close(self) -> None:
        """Leaves the group. Engines that are gone already are only logged."""
        self._disconnect()
        self._calls.close()

    # -- rank 0

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: WeightVersion) -> tuple[int, int]:
        link = self._link
        if link is None:
            raise WeightSyncError("the weight channel must be connected before weights are pushed; call connect")
        self._on_all(lambda engine: engine.pause(self.pause_mode))
        if self.pause_mode != "in_place":
            self._on_all(lambda engine: engine.flush_cache())
        self._on_all(lambda engine: engine.begin_weight_update())
        device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")
        num_buckets = num_bytes = 0
        in_flight: _InFlight | None = None
        for named in cut(weights, self._bucket_bytes):
            packed = pack(named, device)  # gathered while the last bucket travels
            if in_flight is not None:
                self._finish(in_flight)
            in_flight = self._send(packed, link, version)
            num_buckets, num_bytes = num_buckets + 1, num_bytes + packed.flat.nbytes
        if in_flight is not None:
            self._finish(in_flight)
        self._on_all(lambda engine: engine.end_weight_update(version))
        self._verify(version)
        self._on_all(lambda engine: engine.resume())
        return num_buckets, num_bytes

    def _send(self, packed: PackedBucket, link: "_Link", version: WeightVersion) -> "_InFlight":
        calls = [
            self._calls.start(engine.receive_bucket(packed.bucket, group_name=link.group.name, version=version))
            for engine in self._engines
        ]
        return _InFlight(packed=packed, calls=calls, work=self._broadcast(link.process_group, packed))

    def _broadcast(self, process_group: dist.ProcessGroup, packed: PackedBucket) -> dist.Work:
        return start_broadcast(process_group, packed.flat)

    def _finish(self, in_flight: "_InFlight") -> None:
        # First the engines' answers: one that refuses never joins the broadcast, which would then only time out.
        self._settle(in_flight.calls)
        try:
            in_flight.work.wait()
        except RuntimeError as e:
            raise WeightSyncError(f"the broadcast of {in_flight.packed.bucket.names[0]} failed: {e}") from e

    def _verify(self, version: WeightVersion) -> None:
        infos = self._on_all(lambda engine: engine.info())
        for engine, info in zip(self._engines, infos, strict=True):
            if info["weight_version"] != version:
                raise WeightSyncError(
                    f"{engine.address.name} must hold weight version {version} after the sync, "
                    f"got {info['weight_version']}; it still answers from other weights"
                )

    def _on_all(self, call: Callable[[Engine], Coroutine[Any, Any, T]]) -> list[T]:
        futures = [self._calls.start(call(engine)) for engine in self._engines]
        self._settle(futures)
        return [future.result() for future in futures]

    def _settle(self, futures: Sequence["Future[Any]"]) -> None:
        """Returns when all are done, or raises the first failure at once."""
        done, pending = wait(futures, timeout=self._timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        if pending:
            names = ", ".join(engine.address.name for engine in self._engines)
            raise EngineError(f"{names}: weight sync must go on within {self._timeout_s:g} s, got no answer")

    def _abandon(self) -> None:
        """Drops a group that may hang: leaving it can wait for its timeout, which only a thread can afford."""
        link, self._link = self._link, None
        if link is not None:
            _in_thread(lambda: leave_group(link.process_group))

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            for engine in self._engines:
                try:
                    self._settle([self._calls.start(engine.leave_weight_group(link.group.name))])
                except (EngineError, WeightSyncError) as e:
                    log.warning("%s could not leave its weight group: %s", engine.address.name, e)
            leave_group(link.process_group)
        for engine in self._engines:
            self._settle([self._calls.start(engine.close())])
        self._engines = []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    group: WeightGroup
    process_group: dist.ProcessGroup
    store: TCPStore  # lives as long as the group: engines may still read from it


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    packed: PackedBucket  # keeps the bytes while they travel
    calls: list["Future[None]"]
    work: dist.Work


class _Calls:
    """An event loop in a thread, for engine calls that run while this thread sits in a collective."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="weight channel calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _in_thread(run: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=target, name="weight group", daemon=True).start()
    return future
