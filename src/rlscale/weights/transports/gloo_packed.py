"""Weights over gloo as packed buckets: one flat buffer each, the form that SGLang reads.

sender                                    engine
  bucket i+1 -> buffer B                    checks bucket i-1
  buffer A (bucket i)  ══ gloo ═════════>   receives bucket i
"""

import itertools
from collections.abc import Sequence

import torch

from rlscale.types import WeightVersion
from rlscale.weights.buckets import Named, PackedBucket, Staging, pack, split_into_buckets
from rlscale.weights.engine_groups import EngineGroups, GroupOptions, PendingBroadcast, ReadyBucket
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.torch_groups import start_broadcast
from rlscale.weights.transport import SendReport, Transport, Weights

STAGED_BYTES = 64 * 2**20
"""Largest bucket: one bucket is packed while another is sent and a third is checked."""


class PackedTransport(Transport):
    """Copies each bucket into one CPU buffer and broadcasts it, with the checksums announced before it.

    Each engine has its own group. gloo forwards a broadcast from member to member and cannot be interrupted: in a
    common group with an engine that dies, the other engines would wait for their bytes until the timeout.
    """

    def __init__(self, options: GroupOptions) -> None:
        self.groups = EngineGroups(options, backend="gloo")
        self._max_bytes = min(options.bucket_bytes, STAGED_BYTES)
        # Two buffers: one is in transfer while the other is filled.
        self._staging = itertools.cycle((Staging(), Staging()))

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        self.groups.open(rpc)

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        return self.groups.send(split_into_buckets(weights, self._max_bytes), self._prepare, version)

    def close(self) -> None:
        """See Transport."""
        self.groups.close()

    def abort(self) -> None:
        """See Transport."""
        self.groups.abort()

    def _prepare(self, named: Sequence[Named]) -> ReadyBucket:
        packed = pack(named, torch.device("cpu"), staging=next(self._staging))
        return ReadyBucket(bucket=packed.bucket, send=lambda: self._broadcast(packed))

    def _broadcast(self, packed: PackedBucket) -> PendingBroadcast:
        works = [start_broadcast(group, packed.flat) for group in self.groups.process_groups]
        return PendingBroadcast(wait=lambda: [work.wait() for work in works])
