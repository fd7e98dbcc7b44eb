"""The trainer's end of a weight channel through memory that colocated engines share.

trainer rank 0                                       every engine
  begin                        ── HTTP ──────────>
  for each bucket: announce    ── HTTP ──────────>   /update_weights_from_tensor
                   bytes       ══ memory ════════>   compares digests, writes (load_format shared_memory)
                   or handles  ── HTTP ──────────>   SGLang: copies from named shared memory
                   wait        <── HTTP ──────────   200, or which tensor is wrong
  end, version                 ── HTTP ──────────>
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlscale.algo.checksum import Bytes, bytes_of
from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import WeightBucket, WeightVersion
from rlscale.weights.buckets import Named, cut, layout_of
from rlscale.weights.readers import encode_payload
from rlscale.weights.sglang_payload import SharedStaging, serialize
from rlscale.weights.sync import EngineChannel, MakeEngine, Weights
from rlscale.weights.transports.shm_ring import RingWriter

LOAD_FORMAT = "shared_memory"


class SharedMemoryChannel(EngineChannel):
    """Sends weights to engines on this machine. See EngineChannel.

    Args:
        bucket_bytes: most bytes that one request announces (a larger tensor has one of its own).
    """

    def __init__(self, *, make_engine: MakeEngine, rank: int, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(make_engine=make_engine, rank=rank, timeout_s=timeout_s)
        self._bucket_bytes = bucket_bytes
        self._ring: RingWriter | None = None
        self._on_ring: list[Engine] = []
        self._others: list[Engine] = []
        self._staging = SharedStaging()

    def _open(self) -> None:
        self._on_ring, self._others = self._engines_by_format(LOAD_FORMAT)
        if self._on_ring:
            self._ring = RingWriter(len(self._on_ring), timeout_s=self._timeout_s)

    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        num_buckets = num_bytes = 0
        with self._paused(version):
            self._calls.on_all(lambda engine: engine.begin_weight_update())
            for named in cut(weights, self._bucket_bytes):
                self._send(named)
                num_buckets, num_bytes = num_buckets + 1, num_bytes + sum(tensor.nbytes for _, tensor in named)
            self._calls.on_all(lambda engine: engine.end_weight_update(version))
        return num_buckets, num_bytes

    def _send(self, named: Sequence[Named]) -> None:
        calls = self._announce(layout_of(named)) if self._on_ring else []
        if self._others:
            payload = serialize(self._staging.place(named))
            calls += [
                self._calls.start(engine.update_from_tensor([payload] * engine.address.num_ranks, load_format=None))
                for engine in self._others
            ]
        try:
            if self._ring is not None:
                self._ring.accept(lambda: not any(call.done() for call in calls[: len(self._on_ring)]))
                for name, tensor in named:
                    self._write(self._ring, name, bytes_of(tensor.cpu()))
        except WeightSyncError:
            self._calls.settle(calls)  # an engine that gave up says why
            raise
        self._calls.settle(calls)

    def _announce(self, layout: WeightBucket) -> list["Future[Any]"]:
        assert self._ring is not None, "engines on the ring have one"
        return [
            self._calls.start(
                engine.update_from_tensor(
                    [encode_payload({"ring": name, "timeout_s": self._timeout_s}, layout)], load_format=LOAD_FORMAT
                )
            )
            for engine, name in zip(self._on_ring, self._ring.names, strict=True)
        ]

    def _write(self, ring: RingWriter, name: str, data: Bytes) -> None:
        ring.write(data)

    def _shut(self) -> None:
        ring, self._ring = self._ring, None
        self._on_ring, self._others = [], []
        if ring is not None:
            ring.close()
