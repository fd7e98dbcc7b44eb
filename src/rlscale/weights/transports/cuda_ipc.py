"""Weights on a GPU that another process opens in place: the trainer's and the engine's end.

    trainer rank r, on GPU r                              the engine's rank on GPU r
      bucket -> one buffer on the GPU
      handle of the buffer         ── rank 0, HTTP ──>   opens it, compares checksums, copies
      next bucket into the same buffer  <── HTTP ─────   200, or which tensor is wrong

Trainer rank r and the engine rank at the same place in the order of all engine ranks share a GPU; placement sees to it.
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
from rlscale.weights.buckets import PackedBucket, cut, pack, unpack
from rlscale.weights.readers import changed, encode_payload
from rlscale.weights.sglang_payload import serialize
from rlscale.weights.sync import EngineChannel, MakeEngine, Weights

LOAD_FORMAT = "cuda_ipc"
_HANDLE_KEYS = ("device", "handle", "size", "offset", "ref_handle", "ref_offset", "event_handle", "event_sync")


class CudaIpcChannel(EngineChannel):
    """Sends weights to engines that share the trainers' GPUs. See EngineChannel; all ranks take part.

    Args:
        bucket_bytes: most bytes of one buffer (a larger tensor has one of its own).
    """

    def __init__(self, *, make_engine: MakeEngine, rank: int, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(make_engine=make_engine, rank=rank, timeout_s=timeout_s)
        self._bucket_bytes = bucket_bytes
        self._device = torch.device("cuda", torch.cuda.current_device())

    def _open(self) -> None:
        ranks = sum(engine.address.num_ranks for engine in self._calls.engines)
        if ranks > dist.get_world_size():
            raise WeightSyncError(
                f"{self._calls.names} must lie on the GPUs of the {dist.get_world_size()} trainer ranks, "
                f"got {ranks} engine ranks; use train.weight_channel=process_group"
            )

    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        num_buckets = num_bytes = 0
        failure: Exception | None = None
        with self._paused(version):
            self._calls.on_all(lambda engine: engine.begin_weight_update())
            for named in cut(weights, self._bucket_bytes):
                packed = pack(named, self._device)
                payloads = self._exchange(packed)
                try:
                    if failure is None:
                        self._send(packed, payloads)
                except Exception as e:
                    failure = e  # raised below: the other ranks go on to the last bucket, and need this one for that
                dist.barrier()  # from here on every rank may drop its buffer
                num_buckets, num_bytes = num_buckets + 1, num_bytes + packed.flat.nbytes
            if failure is not None:
                raise failure
            self._calls.on_all(lambda engine: engine.end_weight_update(version))
        return num_buckets, num_bytes

    def _gather(self, weights: Weights) -> None:
        for named in cut(weights, self._bucket_bytes):
            packed = pack(named, self._device)
            self._exchange(packed)
            dist.barrier()

    def _exchange(self, packed: PackedBucket) -> list[tuple[str, str]]:
        """The payloads of all ranks' buffers: for our engines, and for SGLang. A collective."""
        torch.cuda.synchronize(self._device)  # the handles carry no order of their own
        own = encode_payload({"ipc": export_handle(packed.flat)}, packed.bucket)
        mine = (own, serialize(list(unpack(packed.bucket, packed.flat).items())))
        everyone: list[tuple[str, str]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone

    def _send(self, packed: PackedBucket, payloads: Sequence[tuple[str, str]]) -> None:
        calls, first = [], 0
        for engine, info in zip(self._calls.engines, self._infos, strict=True):
            ours = LOAD_FORMAT in info.get("weight_formats", ())
            mine = [payload[0 if ours else 1] for payload in payloads[first : first + engine.address.num_ranks]]
            calls.append(self._calls.start(engine.update_from_tensor(mine, load_format=LOAD_FORMAT if ours else None)))
            first += engine.address.num_ranks
        self._calls.settle(calls)

    def _shut(self) -> None:
        """Buffers live for one bucket only."""


def export_handle(flat: Tensor) -> dict[str, Any]:
    """What another process needs to open a tensor's memory, as JSON values. The tensor must outlive its use there."""
    values = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    content = {key: _encoded(value) for key, value in zip(_HANDLE_KEYS, values, strict=True)}
    return {**content, "uuid": str(torch.cuda.get_device_properties(flat.device).uuid), "num_bytes": flat.nbytes}


class CudaIpcWeights:
    """One bucket in another process's GPU memory.

    Raises ValueError when it lies on another GPU than `device` or its handle cannot be opened.
    """

    def __init__(self, handle: Mapping[str, Any], layout: WeightBucket, *, device: torch.device) -> None:
        self.layout, self._handle, self._device = layout, handle, device
        if device.type != "cuda":
            raise ValueError(f"load_format {LOAD_FORMAT!r} must go to an engine on a GPU, got one on {device}")
        here = str(torch.cuda.get_device_properties(device).uuid)
        if handle.get("uuid") != here:
            raise ValueError(f"the weights must lie on the engine's own GPU {here}, got {handle.get('uuid')}")

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        tensors, checksums = unpack(self.layout, self._open()), {}
        for i, (name, sent) in enumerate(zip(self.layout.names, self.layout.checksums, strict=True)):
            checksums[name] = checksum_like(tensors[name], sent)
            if checksums[name] != sent:
                raise changed(name, sent, checksums[name])
            if targets is not None:
                targets[i].copy_(tensors[name])
        torch.cuda.synchronize(self._device)  # the answer tells the trainer that its buffer is free
        return checksums

    def _open(self) -> Tensor:
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        values = [_decoded(self._handle[key]) for key in _HANDLE_KEYS[1:]]
        storage = torch.UntypedStorage._new_shared_cuda(index, *values)
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return flat[: int(self._handle["num_bytes"])]


def _encoded(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decoded(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
