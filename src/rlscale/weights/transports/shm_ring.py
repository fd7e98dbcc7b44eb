"""Weights through memory that colocated engines share: the trainer's and the engine's end.

trainer rank 0                                       every engine
  for each bucket: announce    ── HTTP ──────────>   /update_weights_from_tensor
                   bytes       ══ ring ══════════>   compares digests, writes (load_format shared_memory)
                   or handles  ── HTTP ──────────>   SGLang: copies from named shared memory
                   wait        <── HTTP ──────────   200, or the tensor that is wrong
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from rlscale.algo.checksum import Bytes, bytes_of, digest_of
from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import WeightVersion
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import Named, describe_bucket, split_into_buckets, tensor_sizes
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.readers import checksum_error, encode_payload, open_target
from rlscale.weights.ring_buffer import RingReader, RingWriter
from rlscale.weights.sglang_payload import SharedStaging, serialize
from rlscale.weights.transport import SendReport, Transport, Weights

LOAD_FORMAT = "shared_memory"


class ShmRingTransport(Transport):
    """Sends weights to engines on this machine, from rank 0 alone: all engines read one ring.

    Args:
        bucket_bytes: max bytes that one request announces (a larger tensor has its own request).
        timeout_s: of every wait for a reader of the ring.
    """

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._rpc: EngineRpc | None = None
        self._ring: RingWriter | None = None
        self._ring_engines: list[Engine] = []
        self._sglang_engines: list[Engine] = []
        self._staging = SharedStaging()

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        self._rpc = rpc
        self._ring_engines, self._sglang_engines = rpc.split_by_format(LOAD_FORMAT)
        if self._ring_engines:
            self._ring = self._make_ring(len(self._ring_engines))

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        assert self._rpc is not None, "open comes before send"
        num_buckets = num_bytes = 0
        for named in split_into_buckets(weights, self._bucket_bytes):
            self._send_bucket(self._rpc, named)
            num_buckets, num_bytes = num_buckets + 1, num_bytes + sum(tensor.nbytes for _, tensor in named)
            del named  # before the next bucket is gathered
        return SendReport(num_buckets=num_buckets, num_bytes=num_bytes)

    def close(self) -> None:
        """See Transport."""
        ring, self._ring = self._ring, None
        self._ring_engines, self._sglang_engines = [], []
        if ring is not None:
            ring.close()

    def _send_bucket(self, rpc: EngineRpc, named: Sequence[Named]) -> None:
        calls = self._announce(rpc, describe_bucket(named)) if self._ring is not None else []
        num_ring_calls = len(calls)
        if self._sglang_engines:
            staged = self._staging.copy_in(named)
            calls += [
                rpc.start(engine.update_from_tensor(serialize_for(engine, staged), load_format=None))
                for engine in self._sglang_engines
            ]
        try:
            if self._ring is not None:
                # An engine that answers before it has connected will not connect any more.
                self._ring.accept(lambda: not any(call.done() for call in calls[:num_ring_calls]))
                for name, tensor in named:
                    self._write(self._ring, name, bytes_of(tensor.cpu()))
        except WeightSyncError:
            rpc.wait_all(calls)  # raises the reason that an engine gives
            raise
        rpc.wait_all(calls)

    def _announce(self, rpc: EngineRpc, layout: WeightBucket) -> list["Future[Any]"]:
        assert self._ring is not None, "engines that read the ring have one"
        calls = []
        for engine, name in zip(self._ring_engines, self._ring.names, strict=True):
            payload = encode_payload({"ring": name, "timeout_s": self._timeout_s}, layout)
            calls.append(rpc.start(engine.update_from_tensor([payload], load_format=LOAD_FORMAT)))
        return calls

    def _make_ring(self, num_readers: int) -> RingWriter:
        return RingWriter(num_readers, timeout_s=self._timeout_s)

    def _write(self, ring: RingWriter, name: str, data: Bytes) -> None:
        ring.write(data)


def serialize_for(engine: Engine, staged: Sequence[Named]) -> list[str]:
    """A payload for each rank of an SGLang engine. torch counts the readers of shared memory: each payload has one."""
    return [serialize(staged) for _ in range(engine.address.num_ranks)]


class RingWeights:
    """One bucket that an engine reads from a ring of shared memory."""

    def __init__(self, ring: RingReader, layout: WeightBucket) -> None:
        self._ring, self.layout = ring, layout

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights. Closes the ring after an error: the blocks left in it belong to no other bucket."""
        try:
            return self._write(targets)
        except BaseException:
            self._ring.close()
            raise

    def _write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        layout, checksums = self.layout, {}
        all_targets = targets if targets is not None else [None] * len(layout.names)
        for name, dtype, shape, size, target in zip(
            layout.names, layout.dtypes, layout.shapes, tensor_sizes(layout), all_targets, strict=True
        ):
            buffer, finish = open_target(target, dtype, shape)
            found, sent = self._ring.read(buffer)
            checksums[name] = digest_of(found, size)
            if found != sent:
                raise checksum_error(name, digest_of(sent, size), checksums[name])
            finish()
        return checksums
