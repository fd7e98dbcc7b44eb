"""What the trainer's ends of all weight channels share: the order of calls, and the proof at the end.

    trainer rank 0                                       every engine
      pause                        ── HTTP ──────────>   stops decoding
      the bytes                    ══ the channel ═══>   compares checksums, writes
      version                      ── HTTP ──────────>
      read version back            <── HTTP ──────────   must be the one just sent
      read checksums back          <── HTTP ──────────   SGLang, which has not compared them itself
      resume                       ── HTTP ──────────>

The other trainer ranks only take part in gathering the weights, unless several ranks send: see shares.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import EngineAddress, WeightSyncReport, WeightVersion
from rlscale.weights.engine_rpc import EngineCalls
from rlscale.weights.sglang_checksums import SglangChecksums

log = logging.getLogger(__name__)

MakeEngine = Callable[[EngineAddress], Engine]
Weights = Iterator[tuple[str, Tensor]]


class EngineChannel(ABC):
    """A `WeightChannel`. Every trainer rank calls every method. After an error only `connect` may follow.

    Args:
        make_engine: gives the client of an engine; used on ranks that send only.
        rank: of this trainer.
        timeout_s: of every single step, on both sides.
    """

    pause_mode = "retract"

    def __init__(self, *, make_engine: MakeEngine, rank: int, timeout_s: float) -> None:
        self._make_engine, self._rank, self._timeout_s = make_engine, rank, timeout_s
        self._calls = EngineCalls(timeout_s=timeout_s)
        self._infos: list[Mapping[str, Any]] = []
        self._expected: SglangChecksums | None = None
        self._connected = False

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Links up with all engines, in place of an earlier link.

        Raises EngineError or WeightSyncError naming the engine that cannot be linked.
        """
        if self._rank == 0:
            self._link(engines)
            self._connected = True

    def push(self, weights: Weights, version: WeightVersion) -> WeightSyncReport:
        """Sends all weights and then the version, and reads back what every engine then has.

        Raises:
            WeightSyncError: a tensor arrived changed, or an engine does not hold `version`; the message names it.
            EngineError: an engine failed or did not answer in time; the message names it.
        """
        started = time.perf_counter()
        num_buckets, num_bytes = self._all_push(weights, version)
        seconds = time.perf_counter() - started
        return WeightSyncReport(version=version, num_buckets=num_buckets, num_bytes=num_bytes, seconds=seconds)

    def close(self) -> None:
        """Ends the link. Engines that are gone already are only logged."""
        self._disconnect()
        self._calls.close()

    # -- what a channel adds; on ranks that send only, but for `_gather`

    @abstractmethod
    def _open(self) -> None:
        """Links up with `self._calls.engines`."""

    @abstractmethod
    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        """Brings everything to the engines, the end of it within `_paused`. Returns buckets and bytes."""

    @abstractmethod
    def _shut(self) -> None:
        """Undoes `_open`; is called without an open link too. May wait, and logs engines that do not answer."""

    def _abandon(self) -> None:
        """Drops a link that failed, without waiting for anybody."""
        self._shut()

    def _gather(self, weights: Weights) -> None:
        """The part of the other ranks in `push`."""
        for _ in weights:
            pass

    # -- steps of connect and push

    def _link(self, engines: Sequence[EngineAddress]) -> None:
        """Links this rank up with all engines, in place of an earlier link."""
        self._disconnect()
        self._calls.engines = [self._make_engine(address) for address in engines]
        self._infos = list(self._calls.on_all(lambda engine: engine.info()))
        self._open()

    def _all_push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        """The push of all ranks together. Returns the buckets and bytes of rank 0."""
        if self._rank != 0:
            self._gather(weights)
            return 0, 0
        try:
            self._expect()
            return self._push(self._with_checksums(weights), version)
        except BaseException:
            self._connected = False
            self._abandon()
            # The other ranks are still gathering: they wait for this one, and the next push for all of them.
            self._gather(weights)
            raise

    def _expect(self) -> None:
        """Makes ready to learn what SGLang must answer. Raises WeightSyncError without a link."""
        if not self._connected:
            raise WeightSyncError("the weight channel must be connected before weights are pushed; call connect")
        self._expected = None if all(map(_compares_itself, self._infos)) else SglangChecksums()

    @contextmanager
    def _paused(self, version: WeightVersion) -> Iterator[None]:
        """The engines stand still inside; at the end they are proved to hold `version` and go on."""
        self._pause()
        yield  # the first update drops the caches of the old weights, unless requests stay in place with theirs
        self._verify_and_resume(version)

    def _pause(self) -> None:
        self._calls.on_all(lambda engine: engine.pause(self.pause_mode))

    def _verify_and_resume(self, version: WeightVersion) -> None:
        self._verify(version)
        self._calls.on_all(lambda engine: engine.resume())

    def _verify(self, version: WeightVersion) -> None:
        held = self._calls.on_all(lambda engine: engine.weight_version())
        for engine, got in zip(self._calls.engines, held, strict=True):
            if got != version:
                raise WeightSyncError(
                    f"{engine.address.name} must hold weight version {version} after the sync, "
                    f"got {got}; it still answers from other weights"
                )
        if self._expected is not None:
            self._compare(self._expected)

    def _compare(self, expected: SglangChecksums) -> None:
        for engine, info in zip(self._calls.engines, self._infos, strict=True):
            if _compares_itself(info):
                continue
            if info.get("device", "cpu") != "cpu":
                log.warning(
                    "%s: SGLang on %s hashes weights in a way of its own; their contents are not compared",
                    engine.address.name,
                    info["device"],
                )
                continue
            held = self._calls.start(engine.checksums())
            self._calls.settle([held])
            expected.compare(held.result(), engine=engine.address.name, num_ranks=engine.address.num_ranks)

    def _with_checksums(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            if self._expected is not None:
                self._expected.add(name, tensor)
            yield name, tensor

    def _disconnect(self) -> None:
        self._connected = False
        self._shut()
        self._calls.drop_engines()

    def _engines_by_format(self, load_format: str) -> tuple[list[Engine], list[Engine]]:
        """The engines that read this form of weights, and the others, which are SGLang."""
        readers: list[Engine] = []
        others: list[Engine] = []
        for engine, info in zip(self._calls.engines, self._infos, strict=True):
            (readers if load_format in info.get("weight_formats", ()) else others).append(engine)
        return readers, others

    def _try_all(self, calls: Sequence["Future[Any]"], what: str) -> None:
        """Waits for one call to each engine and only logs those that fail."""
        for engine, call in zip(self._calls.engines, calls, strict=True):
            try:
                self._calls.settle([call])
            except (EngineError, WeightSyncError) as e:
                log.warning("%s could not %s: %s", engine.address.name, what, e)


def _compares_itself(info: Mapping[str, Any]) -> bool:
    """Whether an engine compares the checksums sent along; SGLang does not."""
    return bool(info.get("compares_checksums", False))
