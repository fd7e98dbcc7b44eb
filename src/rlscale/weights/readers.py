"""The engine's side of a transfer: reads announced weights, verifies them and writes them into the live tensors."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest, bytes_of, checksum, checksum_like, digest_of
from rlscale.errors import WeightSyncError
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import parse_dtype, tensor_sizes, unpack


def open_target(target: Tensor | None, dtype: str, shape: Sequence[int]) -> tuple[Bytes, Callable[[], None]]:
    """Returns the buffer for the bytes of a tensor, and a function to call when they are complete.

    The buffer is the memory of a contiguous CPU target of the same dtype, else an intermediate tensor. Either way the
    function increments the target's version, by which engines notice that a copy they made of it is outdated.
    """
    wanted = parse_dtype(dtype)
    if target is not None and target.device.type == "cpu" and target.dtype == wanted and target.is_contiguous():
        # torch does not notice writes to a tensor's bytes, so its version is incremented here.
        return bytes_of(target), partial(increment_version, target)
    intermediate = torch.empty(list(shape), dtype=wanted)

    def finish() -> None:
        if target is not None:
            target.copy_(intermediate)

    return bytes_of(intermediate), finish


def checksum_error(name: str, sent: str, got: str) -> WeightSyncError:
    """Returns the error for a tensor that is not the one that was sent."""
    return WeightSyncError(f"{name} must arrive with checksum {sent}, got {got}; its bytes changed in transfer")


def copy_verified(name: str, source: Bytes, target: Bytes, sent: str) -> str:
    """Copies the bytes of a tensor and returns their checksum; raises unless it is `sent` (empty: not compared)."""
    digests = []
    for start in range(0, source.size, BLOCK_BYTES):
        # Hash, then copy: the block is still in cache.
        block = source[start : start + BLOCK_BYTES]
        digests.append(block_digest(block))
        target[start : start + BLOCK_BYTES] = block
    got = digest_of(digests, source.size)
    if sent and not sent.startswith("xxh3:"):
        got = checksum_like(torch.from_numpy(source), sent)
    if sent and got != sent:
        raise checksum_error(name, sent, got)
    return got


class BroadcastWeights:
    """One bucket in transfer through a process group, into `flat`."""

    def __init__(self, layout: WeightBucket, flat: Tensor, work: dist.Work, *, group_name: str) -> None:
        self.layout, self._flat, self._work, self._group_name = layout, flat, work, group_name

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        try:
            self._work.wait()
        except RuntimeError as e:
            message = f"weight group {self._group_name!r} failed at {self.layout.names[0]}: {e}"
            raise WeightSyncError(message) from e
        tensors, checksums = unpack(self.layout, self._flat), {}
        announced = self.layout.checksums or [""] * len(tensors)
        for i, (name, tensor) in enumerate(tensors.items()):
            target = None if targets is None else targets[i]
            if tensor.device.type == "cpu" and target is not None:
                buffer, finish = open_target(target, self.layout.dtypes[i], self.layout.shapes[i])
                checksums[name] = copy_verified(name, bytes_of(tensor), buffer, announced[i])
                finish()
                continue
            checksums[name] = checksum_like(tensor, announced[i]) if announced[i] else checksum(tensor)
            if announced[i] and checksums[name] != announced[i]:
                raise checksum_error(name, announced[i], checksums[name])
            if target is not None:
                target.copy_(tensor)
        return checksums


def encode_payload(content: Mapping[str, Any], layout: WeightBucket) -> str:
    """Encodes one entry of `serialized_named_tensors` as rlscale's servers read it: base64 of JSON."""
    parts = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes, "checksums": layout.checksums}
    return base64.b64encode(json.dumps({**content, **parts}).encode()).decode()


def decode_payload(payload: str) -> tuple[dict[str, Any], WeightBucket]:
    """Decodes the result of `encode_payload`. Raises ValueError for anything else."""
    try:
        content = json.loads(base64.b64decode(payload, validate=True))
    except (binascii.Error, ValueError) as e:
        raise ValueError(f"a payload must be base64-encoded JSON, got an error: {e}") from e
    if not isinstance(content, dict):
        raise ValueError(f"a payload must be a JSON object, got {type(content).__name__}")
    lists = [content.pop(key, None) for key in ("names", "dtypes", "shapes", "checksums")]
    names, dtypes, shapes, checksums = lists
    if not all(isinstance(each, list) for each in lists) or not len(names) == len(dtypes) == len(shapes):
        raise ValueError("a payload must have names, dtypes and shapes of equal length, and checksums")
    if checksums and len(checksums) != len(names):
        raise ValueError(f"a payload must have {len(names)} checksums or none, got {len(checksums)}")
    layout = WeightBucket(names=names, dtypes=dtypes, shapes=shapes, checksums=checksums)
    tensor_sizes(layout)  # raises for a dtype that does not exist
    return content, layout
