"""Weights that have been announced to an engine: how each kind is read, verified and written."""

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
from rlscale.types import WeightBucket
from rlscale.weights.buckets import dtype_of, sizes_of, unpack
from rlscale.weights.transports.shm_ring import RingReader


def landing(target: Tensor | None, dtype: str, shape: Sequence[int]) -> tuple[Bytes, Callable[[], None]]:
    """Where the bytes of a tensor go, and what to call when they are there.

    A target of the same dtype on the CPU is written at once, any other by way of a tensor in between. Either way the
    call counts up the target's version, by which engines know that a copy they made of it is out of date.
    """
    wanted = dtype_of(dtype)
    if target is not None and target.device.type == "cpu" and target.dtype == wanted and target.is_contiguous():
        return bytes_of(target), partial(increment_version, target)  # torch does not see writes to its bytes
    between = torch.empty(list(shape), dtype=wanted)

    def finish() -> None:
        if target is not None:
            target.copy_(between)

    return bytes_of(between), finish


def changed(name: str, sent: str, got: str) -> WeightSyncError:
    """The error for a tensor that is not what was sent."""
    return WeightSyncError(f"{name} must arrive with checksum {sent}, got {got}; its bytes were changed")


def copy_checked(name: str, source: Bytes, target: Bytes, sent: str) -> str:
    """Copies the bytes of a tensor and returns their checksum; raises unless it is `sent` (empty: any will do)."""
    digests = []
    for start in range(0, source.size, BLOCK_BYTES):
        block = source[start : start + BLOCK_BYTES]
        digests.append(block_digest(block))
        target[start : start + BLOCK_BYTES] = block  # still in cache
    got = digest_of(digests, source.size)
    if sent and not sent.startswith("xxh3:"):
        got = checksum_like(torch.from_numpy(source), sent)
    if sent and got != sent:
        raise changed(name, sent, got)
    return got


class BroadcastWeights:
    """One bucket on its way through a process group, into `flat`."""

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
                into, finish = landing(target, self.layout.dtypes[i], self.layout.shapes[i])
                checksums[name] = copy_checked(name, bytes_of(tensor), into, announced[i])
                finish()
                continue
            checksums[name] = checksum_like(tensor, announced[i]) if announced[i] else checksum(tensor)
            if announced[i] and checksums[name] != announced[i]:
                raise changed(name, announced[i], checksums[name])
            if target is not None:
                target.copy_(tensor)
        return checksums


class RingWeights:
    """One bucket that comes through a ring of shared memory."""

    def __init__(self, ring: RingReader, layout: WeightBucket) -> None:
        self._ring, self.layout = ring, layout

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights. After an error the ring is closed: what is still in it belongs to nobody."""
        try:
            return self._write(targets)
        except BaseException:
            self._ring.close()
            raise

    def _write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        layout, checksums = self.layout, {}
        places = targets if targets is not None else [None] * len(layout.names)
        for name, dtype, shape, size, target in zip(
            layout.names, layout.dtypes, layout.shapes, sizes_of(layout), places, strict=True
        ):
            into, finish = landing(target, dtype, shape)
            found, sent = self._ring.read(into)
            checksums[name] = digest_of(found, size)
            if found != sent:
                raise changed(name, digest_of(sent, size), checksums[name])
            finish()
        return checksums


def encode_payload(content: Mapping[str, Any], layout: WeightBucket) -> str:
    """One entry of `serialized_named_tensors` as our servers read it: base64 of JSON."""
    parts = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes, "checksums": layout.checksums}
    return base64.b64encode(json.dumps({**content, **parts}).encode()).decode()


def decode_payload(payload: str) -> tuple[dict[str, Any], WeightBucket]:
    """The inverse of `encode_payload`. Raises ValueError for anything else."""
    try:
        content = json.loads(base64.b64decode(payload, validate=True))
    except (binascii.Error, ValueError) as e:
        raise ValueError(f"a payload must be base64 of JSON, got something else ({e})") from e
    if not isinstance(content, dict):
        raise ValueError(f"a payload must hold a JSON object, got {type(content).__name__}")
    lists = [content.pop(key, None) for key in ("names", "dtypes", "shapes", "checksums")]
    names, dtypes, shapes, checksums = lists
    if not all(isinstance(each, list) for each in lists) or not len(names) == len(dtypes) == len(shapes):
        raise ValueError("a payload must have names, dtypes and shapes of one length, and checksums")
    if checksums and len(checksums) != len(names):
        raise ValueError(f"a payload must have {len(names)} checksums or none, got {len(checksums)}")
    layout = WeightBucket(names=names, dtypes=dtypes, shapes=shapes, checksums=checksums)
    sizes_of(layout)  # raises for a dtype that does not exist
    return content, layout
