"""Weights on a GPU that another process opens in place: the trainer's and the engine's end.

    trainer rank r, on GPU r                              the engine's rank on GPU r
      bucket -> one buffer on the GPU
      handle of the buffer         ── rank 0, HTTP ──>   opens it, compares checksums, copies
      next bucket into a new buffer     <── HTTP ─────   200, or the tensor that is wrong

Trainer rank r shares a GPU with the engine rank at the same position in the order of all engine ranks, on whichever
node; placement ensures it. SGLang's ranks open the handle at their tensor-parallel rank, so an engine must not have
pipeline stages.

torch counts the readers of an exported buffer, and keeps its memory until each of them has opened and freed it. So a
buffer is exported only in the form that its reader opens, and not at all where there is none.
"""

import base64
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import checksum_like
from rlscale.errors import WeightSyncError
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import PackedBucket, pack, split_into_buckets, unpack
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.readers import checksum_error, encode_payload
from rlscale.weights.sglang_payload import serialize
from rlscale.weights.transport import SendReport, Transport, Weights

T = TypeVar("T")
LOAD_FORMAT = "cuda_ipc"
SGLANG = "sglang"
# The values of torch's `_share_cuda_`, in its order.
_HANDLE_KEYS = ("device", "handle", "size", "offset", "ref_handle", "ref_offset", "event_handle", "event_sync")


class CudaIpcTransport(Transport):
    """Shares buckets with engines on the trainers' GPUs. Rank 0 sends the handles of all ranks' buffers.

    Args:
        bucket_bytes: max bytes of one buffer (a larger tensor has its own buffer).
        device: of the buffers; None: the current GPU.
    """

    def __init__(self, *, bucket_bytes: int, device: torch.device | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device or torch.device("cuda", torch.cuda.current_device())
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
        assert self._rpc is not None, "open comes before send"
        addresses = [engine.address for engine in self._rpc.engines]
        readers = readers_by_rank(addresses, self._rpc.infos, world_size=dist.get_world_size())
        for named in split_into_buckets(weights, self._bucket_bytes):
            packed = pack(named, self._device)
            # After a failure no engine opens a buffer.
            payloads = self._all_gather_payloads(packed, readers if failure is None else [None] * len(readers))
            try:
                if failure is None:
                    self._send_handles(payloads)
            except Exception as e:
                # Raised after the last bucket: the collectives of the other ranks need this rank until then.
                failure = e
            dist.barrier()  # after it every rank may free its buffer
            num_buckets, num_bytes = num_buckets + 1, num_bytes + packed.flat.nbytes
            del packed  # before the next buffer is allocated
        if failure is not None:
            raise failure
        return SendReport(num_buckets=num_buckets, num_bytes=num_bytes)

    def drain(self, weights: Weights) -> None:
        """See Transport. Provides this rank's buffers to the engine rank on its GPU."""
        for named in split_into_buckets(weights, self._bucket_bytes):
            packed = pack(named, self._device)
            # Rank 0 knows the readers. Where it is here itself, after a failure, there are none.
            self._all_gather_payloads(packed, [None] * dist.get_world_size())
            dist.barrier()
            del packed

    def close(self) -> None:
        """Does nothing: a buffer lives for one bucket only."""

    def _all_gather_payloads(self, packed: PackedBucket, readers: Sequence[str | None]) -> list[str | None]:
        """Returns the payloads of all ranks' buffers, None for a rank without a reader. A collective.

        Args:
            packed: of this rank.
            readers: see `readers_by_rank`; those of rank 0 count.
        """
        box: list[Any] = [readers]
        dist.broadcast_object_list(box, src=0)
        reader = box[0][dist.get_rank()]
        payloads: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(payloads, None if reader is None else self._export(packed, reader))
        return payloads

    def _export(self, packed: PackedBucket, reader: str) -> str:
        """The payload with which the engines of a kind open a buffer."""
        # A handle carries no stream order: the buffer must be complete before another process opens it.
        torch.cuda.synchronize(self._device)
        if reader == SGLANG:
            return serialize(list(unpack(packed.bucket, packed.flat).items()))
        return encode_payload({"ipc": export_handle(packed.flat)}, packed.bucket)

    def _send_handles(self, payloads: Sequence[str | None]) -> None:
        assert self._rpc is not None, "open comes before send"
        calls = []
        shares = share_by_engine(payloads, [engine.address.num_ranks for engine in self._rpc.engines])
        for engine, info, share in zip(self._rpc.engines, self._rpc.infos, shares, strict=True):
            of_engine = [payload for payload in share if payload is not None]
            load_format = LOAD_FORMAT if _reader(info) == LOAD_FORMAT else None
            calls.append(self._rpc.start(engine.update_from_tensor(of_engine, load_format=load_format)))
        self._rpc.wait_all(calls)


def share_by_engine(by_trainer_rank: Sequence[T], num_ranks: Sequence[int]) -> list[Sequence[T]]:
    """The entries of the trainer ranks that are on the GPUs of each engine, in the order of the engine's ranks.

    Args:
        num_ranks: of each engine, over all its processes.
    """
    ends = list(itertools.accumulate(num_ranks))
    return [by_trainer_rank[end - number : end] for end, number in zip(ends, num_ranks, strict=True)]


def readers_by_rank(
    addresses: Sequence[EngineAddress], infos: Sequence[Mapping[str, Any]], *, world_size: int
) -> list[str | None]:
    """Kind of the engine rank on the GPU of each trainer rank; None: there is none."""
    kinds = [_reader(info) for address, info in zip(addresses, infos, strict=True) for _ in range(address.num_ranks)]
    return [*kinds, *[None] * (world_size - len(kinds))]


def _reader(info: Mapping[str, Any]) -> str:
    return LOAD_FORMAT if LOAD_FORMAT in info.get("weight_formats", ()) else SGLANG


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
