"""Weights that have been announced to an engine: how each kind is read, verified and written."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.types import WeightBucket
from rlscale.weights.buckets import dtype_of, sizes_of
from rlscale.weights.checksum import Bytes, bytes_of, digest_of
from rlscale.weights.ring import RingReader


def landing(target: Tensor | None, dtype: str, shape: Sequence[int]) -> tuple[Bytes, Callable[[], None]]:
    """Where the bytes of a tensor go, and what to call when they are there.

    A target of the same dtype on the CPU is written at once, any other by way of a tensor in between.
    """
    wanted = dtype_of(dtype)
    if target is not None and target.device.type == "cpu" and target.dtype == wanted and target.is_contiguous():
        return bytes_of(target), _nothing
    between = torch.empty(list(shape), dtype=wanted)

    def finish() -> None:
        if target is not None:
            target.copy_(between)

    return bytes_of(between), finish


def changed(name: str, sent: str, got: str) -> WeightSyncError:
    """The error for a tensor that is not what was sent."""
    return WeightSyncError(f"{name} must arrive with checksum {sent}, got {got}; its bytes were changed")


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


def _nothing() -> None:
    pass
