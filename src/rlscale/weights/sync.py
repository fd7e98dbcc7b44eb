"""Weight sync: pauses all engines, sends the weights through a transport, verifies them and resumes the engines.

    rank 0                      other senders               other ranks         every engine
      pause, begin     ───────────────────────────────────────────────────────>   stops decoding
      ···················· all_gather: the engines are ready ··················
      own weights      ════════════════════════════════════════════════════════>  compares checksums, writes
                                own weights      ═════════════════════════════>
      shards           <══════> shards           <════════> shards
      ···················· all_gather: all weights are sent ···················
      end, version     ───────────────────────────────────────────────────────>
      version          <───────────────────────────────────────────────────────   must be the one just sent
      checksums        <───────────────────────────────────────────────────────   SGLang, which compares none itself
      resume           ───────────────────────────────────────────────────────>   decodes
      ···················· all_gather: verified ·······························

With a transport that does not stream, engines decode while ranks send, and are paused only to load the weights.

With rank 0 as the only sender no rank waits for another: the other ranks only gather weights. With several senders a
failure on one rank reaches all ranks by the next all_gather. The failed rank takes part in it: it sends nothing more,
but still gives the other ranks the shards that they need.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlscale.config import WeightPrecision
from rlscale.errors import WeightSyncError
from rlscale.models.quantized_weights import quantize_weights
from rlscale.protocols import Engine
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import WeightSyncReport
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sglang_checksums import SglangChecksums
from rlscale.weights.transport import SendReport, Transport, Weights

log = logging.getLogger(__name__)

MakeEngine = Callable[[EngineAddress], Engine]


class WeightSync:
    """A `WeightChannel`: the order of a sync, the pause and the verification, over one transport.

    Every trainer rank calls every method. After an error only `connect` and `close` may follow.

    Args:
        transport: carries the bytes.
        make_engine: builds the client of an engine; used on rank 0 and on senders.
        group: this rank, and the ranks whose iterators give weights to `push`, each weight on one of them.
        timeout_s: of every single step, on both sides.
        pause_mode: treatment of running requests while the engines are paused.
        precision: to which linear layers are quantised, before checksums are computed. None: sent as they are.

    Example:
        sync = WeightSync(transport, make_engine=..., group=SenderGroup(rank=0), timeout_s=60)
        sync.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:30000")])
        sync.push(backend.weights(), version=1)
        sync.close()
    """

    def __init__(
        self,
        transport: Transport,
        *,
        make_engine: MakeEngine,
        group: SenderGroup,
        timeout_s: float,
        pause_mode: str = "retract",
        precision: WeightPrecision | None = None,
    ) -> None:
        self.transport, self._precision = transport, precision
        self._make_engine, self._group, self._pause_mode = make_engine, group, pause_mode
        self.rpc = EngineRpc(timeout_s=timeout_s)
        self._expected: SglangChecksums | None = None
        self._connected = False

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Links up with all engines, in place of an earlier link.

        Raises EngineError or WeightSyncError naming the engine that cannot be linked.
        """
        self._connected = False
        try:
            # One rank after the other: an engine joins one process group at a time.
            for rank in self._group.linked_ranks:
                self._group.all_gather_result(partial(self._open, engines, on_rank=rank))
        except BaseException:
            self.transport.abort()
            raise
        self._connected = True

    def push(
        self, weights: Weights, version: WeightVersion, *, before_resume: Callable[[], None] | None = None
    ) -> WeightSyncReport:
        """Sends all weights and then the version, and reads back what every engine then has.

        Args:
            before_resume: called on rank 0 when the engines are verified and still paused.

        Raises:
            WeightSyncError: a tensor arrived changed, or an engine does not hold `version`; the message names it.
            EngineError: an engine failed or did not answer in time; the message names it.
        """
        started = time.perf_counter()
        reports: Sequence[SendReport] = ()
        if self._group.is_active:
            reports = self._push(weights, version, before_resume)
        else:
            self.transport.drain(weights)
        return WeightSyncReport(
            version=version,
            num_buckets=sum(report.num_buckets for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Ends the link. Engines that no longer answer are only logged."""
        self._disconnect()
        self.rpc.close()

    # -- the steps of connect and push

    def _open(self, engines: Sequence[EngineAddress], *, on_rank: int) -> None:
        if self._group.rank != on_rank:
            return
        self._disconnect()
        self.rpc.connect([self._make_engine(address) for address in engines])
        self._check_precisions()
        self.transport.open(self.rpc)

    def _check_precisions(self) -> None:
        # SGLang does not report it; it refuses tensors that it does not know.
        for engine, info in zip(self.rpc.engines, self.rpc.infos, strict=True):
            if _compares_checksums(info) and info.get("weight_precision") != self._precision:
                raise WeightSyncError(
                    f"{engine.address.name} must hold weights in {self._precision or 'the dtype of the trainer'}, as "
                    f"they are sent, got weight_precision={info.get('weight_precision')}"
                )

    def _disconnect(self) -> None:
        self._connected = False
        self.transport.close()
        self.rpc.close_clients()

    def _push(
        self, weights: Weights, version: WeightVersion, before_resume: Callable[[], None] | None
    ) -> list[SendReport]:
        try:
            self._group.all_gather_result(lambda: self._begin(version))
            reports = self._group.all_gather_result(lambda: self._send(weights, version))
            self._group.all_gather_result(lambda: self._finish(version, reports, before_resume))
        except BaseException:
            self._connected = False
            self.transport.abort()
            if self._group.is_single:
                # The other ranks do not learn of the failure: they still gather, and wait for the shards of this rank.
                self.transport.drain(weights)
            raise
        return reports

    def _begin(self, version: WeightVersion) -> None:
        if not self._connected:
            raise WeightSyncError("the weight channel must be connected before weights are pushed; call connect")
        compared = [info for info in self.rpc.infos if _reports_checksums(info)]
        self._expected = SglangChecksums({int(info.get("tp_size", 1)) for info in compared}) if compared else None
        if self._group.rank != 0:
            return
        self.transport.prepare(version)
        if self.transport.streams:
            self._pause()
            self.rpc.call_all(lambda engine: engine.begin_weight_update())

    def _send(self, weights: Weights, version: WeightVersion) -> SendReport:
        try:
            if not self._group.is_sender:
                return SendReport()
            sent = weights if self._precision is None else quantize_weights(weights, self._precision)
            report = self.transport.send(self._with_checksums(sent), version)
            if self._expected is None:
                return report
            return replace(report, sglang_checksums=self._expected.expected())
        finally:
            if not self._group.is_single:
                self.transport.drain(weights)

    def _finish(
        self, version: WeightVersion, reports: Sequence[SendReport], before_resume: Callable[[], None] | None
    ) -> None:
        if self._group.rank != 0:
            return
        if self._expected is not None:
            for report in reports:
                self._expected.update(report.sglang_checksums)
        apply = self.transport.publish(version, reports)
        if not self.transport.streams:
            self._pause()
        self.rpc.call_all(apply)
        self._verify(version)
        if before_resume is not None:
            before_resume()
        self.rpc.call_all(lambda engine: engine.resume())
        self.transport.prune()

    def _with_checksums(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            if self._expected is not None:
                self._expected.add(name, tensor)
            yield name, tensor

    def _pause(self) -> None:
        # No flush: the first update drops the caches of the old weights, unless requests stay in place with theirs.
        self.rpc.call_all(lambda engine: engine.pause(self._pause_mode))

    def _verify(self, version: WeightVersion) -> None:
        versions = self.rpc.call_all(lambda engine: engine.weight_version())
        for engine, got in zip(self.rpc.engines, versions, strict=True):
            if got != version:
                raise WeightSyncError(
                    f"{engine.address.name} must hold weight version {version} after the sync, "
                    f"got {got}; it still generates with other weights"
                )
        for engine, info in zip(self.rpc.engines, self.rpc.infos, strict=True):
            if self._expected is not None and _reports_checksums(info):
                self._compare_checksums(engine, self._expected)
            elif not _compares_checksums(info):
                log.warning(
                    "%s: SGLang on %s uses another hash; the contents of its weights are not compared",
                    engine.address.name,
                    info["device"],
                )

    def _compare_checksums(self, engine: Engine, expected: SglangChecksums) -> None:
        checksums = self.rpc.start(engine.checksums())
        self.rpc.wait_all([checksums])
        ranks, (name, number) = checksums.result(), (engine.address.name, engine.address.num_ranks)
        if len(ranks) < number:
            log.warning("%s: %d of its %d ranks report the checksums of their weights", name, len(ranks), number)
        expected.compare(ranks, engine=name)


def _compares_checksums(info: Mapping[str, Any]) -> bool:
    """Whether an engine compares the checksums sent along; SGLang does not."""
    return bool(info.get("compares_checksums", False))


def _reports_checksums(info: Mapping[str, Any]) -> bool:
    """Whether an engine is an SGLang server whose checksums are computed as here: on a GPU it uses another hash."""
    return not _compares_checksums(info) and info.get("device", "cpu") == "cpu"
