"""Weights on a GPU that another process opens in place: the trainer's and the engine's end.

    trainer rank r, on GPU r                              the engine's rank on GPU r
      bucket -> one buffer on the GPU
      handle of the buffer         ── rank 0, HTTP ──>   opens it, compares checksums, copies
      next bucket into a new buffer     <── HTTP ─────   200, or the tensor that is wrong

Trainer rank r shares a GPU with the engine rank at the same position in the order of all engine ranks; placement
ensures it.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import checksum_like
from rlscale.errors import WeightSyncError
from rlscale.types import WeightBucket, WeightVersion
from rlscale.weights.buckets import PackedBucket, pack, split_into_buckets, unpack
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.readers import checksum_error, encode_payload
from rlscale.weights.sglang_payload import serialize
from rlscale.weights.transport import SendReport, Transport, Weights

LOAD_FORMAT = "cuda_ipc"
# The values of torch's `_share_cuda_`, in its order.
_HANDLE_KEYS = ("device", "handle", "size", "offset", "ref_handle", "ref_offset", "event_handle", "event_sync")


class CudaIpcTransport(Transport):
    """Shares buckets with engines on the trainers' GPUs. Rank 0 sends the handles of all ranks' buffers.

    Args:
        bucket_bytes: max bytes of one buffer (a larger tensor has its own buffer).
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._rpc: EngineRpc | None = None

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        num_engine_ranks = sum(engine.address.num_ranks for engine in rpc.engines)
        if num_engine_ranks > dist.get_world_size():
            raise WeightSyncError(
                f"{rpc.names} must be on the GPUs of the {dist.get_world_size()} trainer ranks, "
                f"got {num_engine_ranks} engine ranks; use train.weight_channel=process_group"
            )
        self._rpc = rpc

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport. The other ranks call `drain` with the same weights."""
        num_buckets = num_bytes = 0
        failure: Exception | None = None
        for named in split_into_buckets(weights, self._bucket_bytes):
            packed = pack(named, self._device)
            payloads = self._all_gather_payloads(packed)
            try:
                if failure is None:
                    self._send_handles(packed, payloads)
            except Exception as e:
                # Raised after the last bucket: the collectives of the other ranks need this rank until then.
                failure = e
            dist.barrier()  # after it every rank may free its buffer
            num_buckets, num_bytes = num_buckets + 1, num_bytes + packed.flat.nbytes
        if failure is not None:
            raise failure
        return SendReport(num_buckets=num_buckets, num_bytes=num_bytes)

    def drain(self, weights: Weights) -> None:
        """See Transport. Provides this rank's buffers to the engine rank on its GPU."""
        for named in split_into_buckets(weights, self._bucket_bytes):
            packed = pack(named, self._device)
            self._all_gather_payloads(packed)
            dist.barrier()

    def close(self) -> None:
        """Does nothing: a buffer lives for one bucket only."""

    def _all_gather_payloads(self, packed: PackedBucket) -> list[tuple[str, str]]:
        """Returns the payloads of all ranks' buffers: for engines of rlscale, and for SGLang. A collective."""
        # A handle carries no stream order: the buffer must be complete before another process opens it.
        torch.cuda.synchronize(self._device)
        payload = encode_payload({"ipc": export_handle(packed.flat)}, packed.bucket)
        own = (payload, serialize(list(unpack(packed.bucket, packed.flat).items())))
        payloads: list[tuple[str, str]] = [own] * dist.get_world_size()
        dist.all_gather_object(payloads, own)
        return payloads

    def _send_handles(self, packed: PackedBucket, payloads: Sequence[tuple[str, str]]) -> None:
        assert self._rpc is not None, "open comes before send"
        # Engine i has the GPUs of trainer ranks first .. first + num_ranks - 1.
        calls, first = [], 0
        for engine, info in zip(self._rpc.engines, self._rpc.infos, strict=True):
            reads_ours = LOAD_FORMAT in info.get("weight_formats", ())
            of_engine = [p[0 if reads_ours else 1] for p in payloads[first : first + engine.address.num_ranks]]
            load_format = LOAD_FORMAT if reads_ours else None
            calls.append(self._rpc.start(engine.update_from_tensor(of_engine, load_format=load_format)))
            first += engine.address.num_ranks
        self._rpc.wait_all(calls)


def export_handle(flat: Tensor) -> dict[str, Any]:
    """Returns as JSON values what another process needs to open a tensor's memory. The tensor must outlive its use."""
    values = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    content = {key: _encode(value) for key, value in zip(_HANDLE_KEYS, values, strict=True)}
    return {**content, "uuid": str(torch.cuda.get_device_properties(flat.device).uuid), "num_bytes": flat.nbytes}


class CudaIpcWeights:
    """One bucket in another process's GPU memory.

    Raises ValueError when it is on another GPU than `device` or its handle cannot be opened.
    """

    def __init__(self, handle: Mapping[str, Any], layout: WeightBucket, *, device: torch.device) -> None:
        self.layout, self._handle, self._device = layout, handle, device
        if device.type != "cuda":
            raise ValueError(f"load_format {LOAD_FORMAT!r} must go to an engine on a GPU, got one on {device}")
        own_uuid = str(torch.cuda.get_device_properties(device).uuid)
        if handle.get("uuid") != own_uuid:
            raise ValueError(f"the weights must be on the engine's own GPU {own_uuid}, got {handle.get('uuid')}")

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        tensors, checksums = unpack(self.layout, self._open()), {}
        for i, (name, sent) in enumerate(zip(self.layout.names, self.layout.checksums, strict=True)):
            checksums[name] = checksum_like(tensors[name], sent)
            if checksums[name] != sent:
                raise checksum_error(name, sent, checksums[name])
            if targets is not None:
                targets[i].copy_(tensors[name])
        # The answer allows the trainer to free its buffer, so all copies must be complete.
        torch.cuda.synchronize(self._device)
        return checksums

    def _open(self) -> Tensor:
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        values = [_decode(self._handle[key]) for key in _HANDLE_KEYS[1:]]
        storage = torch.UntypedStorage._new_shared_cuda(index, *values)
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return flat[: int(self._handle["num_bytes"])]


def _encode(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
