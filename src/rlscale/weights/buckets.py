"""Buckets of named tensors: each bucket is one flat buffer, sent with one request and one broadcast.

The layout is SGLang's `load_format="flattened_bucket"`: the bytes of the tensors one after the other, in the order of
the names.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest, bytes_of, checksum, digest_of
from rlscale.weight_types import WeightBucket

Named = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBucket:
    """A bucket that is ready to be sent. `flat` is uint8."""

    bucket: WeightBucket
    flat: Tensor


def split_into_buckets(weights: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Yields buckets of at most `max_bytes`; a larger tensor has its own bucket.

    A bucket has one dtype, so that every tensor in it starts at an address that is aligned for its elements.
    """
    filling: dict[torch.dtype, list[Named]] = {}
    for name, tensor in weights:
        open_bucket = filling.setdefault(tensor.dtype, [])
        if open_bucket and sum(t.nbytes for _, t in open_bucket) + tensor.nbytes > max_bytes:
            yield open_bucket
            open_bucket = filling[tensor.dtype] = []
        open_bucket.append((name, tensor))
    yield from (bucket for bucket in filling.values() if bucket)


def describe_bucket(named: Sequence[Named]) -> WeightBucket:
    """Returns names, dtypes and shapes, without checksums."""
    return WeightBucket(
        names=[name for name, _ in named],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        shapes=[list(tensor.shape) for _, tensor in named],
        checksums=[],
    )


class Staging:
    """A reusable CPU buffer for one bucket: new memory is written at half the speed."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """Returns the first `num_bytes`, whose content is lost."""
        if self._flat.numel() < num_bytes:
            self._flat = torch.empty(num_bytes, dtype=torch.uint8)
        return self._flat[:num_bytes]


def pack(named: Sequence[Named], device: torch.device, *, staging: Staging | None = None) -> PackedBucket:
    """Copies the tensors into one buffer and computes the checksum of each.

    Args:
        device: of the buffer.
        staging: of a buffer on the CPU. None: new memory.
    """
    layout = describe_bucket(named)
    if device.type != "cpu":
        tensors = [tensor.detach().contiguous().to(device) for _, tensor in named]
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
        return PackedBucket(bucket=replace(layout, checksums=[checksum(t) for t in tensors]), flat=flat)
    flat = (staging or Staging()).reserve(sum(tensor.nbytes for _, tensor in named))
    # Tensor i is at [start, start + nbytes) of the buffer, where start is the sum of the sizes before it.
    target, start, checksums = bytes_of(flat), 0, []
    for _, tensor in named:
        checksums.append(copy_with_checksum(bytes_of(tensor.cpu()), target[start : start + tensor.nbytes]))
        start += tensor.nbytes
    return PackedBucket(bucket=replace(layout, checksums=checksums), flat=flat)


def copy_with_checksum(source: Bytes, target: Bytes) -> str:
    """Copies and returns the checksum of the bytes that are then in `target`. Both are [bytes]"""
    digests = []
    for start in range(0, source.size, BLOCK_BYTES):
        # Block by block: each is hashed while it is still in cache.
        block = target[start : start + BLOCK_BYTES]
        block[:] = source[start : start + BLOCK_BYTES]
        digests.append(block_digest(block))
    return digest_of(digests, source.size)


def tensor_sizes(bucket: WeightBucket) -> list[int]:
    """Returns the bytes of each tensor. Raises ValueError for a dtype that torch does not have."""
    return [parse_dtype(d).itemsize * math.prod(s) for d, s in zip(bucket.dtypes, bucket.shapes, strict=True)]


def allocate_flat(bucket: WeightBucket, device: torch.device) -> Tensor:
    """Allocates a buffer for the bytes of `bucket`."""
    return torch.empty(sum(tensor_sizes(bucket)), dtype=torch.uint8, device=device)


def unpack(bucket: WeightBucket, flat: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of a received buffer, as views."""
    tensors, start = {}, 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = parse_dtype(dtype_name)
        end = start + dtype.itemsize * math.prod(shape)
        tensors[name] = flat[start:end].view(dtype).view(shape)
        start = end
    return tensors


def parse_dtype(name: str) -> torch.dtype:
    """Returns `torch.<name>`. Raises ValueError when torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a bucket's dtypes must be names of torch dtypes, got {name!r}")
    return dtype
