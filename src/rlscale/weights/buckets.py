"""Named tensors cut into buckets, each one flat buffer of bytes: one request and one broadcast a bucket.

The layout is SGLang's `load_format="flattened_bucket"`: the bytes of the tensors end to end, in the order of the names.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, Bytes, block_digest, bytes_of, checksum, digest_of
from rlscale.types import WeightBucket

Named = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBucket:
    """A bucket ready to be sent. `flat` is uint8."""

    bucket: WeightBucket
    flat: Tensor


def cut(weights: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Buckets of at most `max_bytes`; a larger tensor has one of its own.

    A bucket holds one dtype, so that every tensor in it begins at an address that its elements can have.
    """
    filling: dict[torch.dtype, list[Named]] = {}
    for name, tensor in weights:
        open_bucket = filling.setdefault(tensor.dtype, [])
        if open_bucket and sum(t.nbytes for _, t in open_bucket) + tensor.nbytes > max_bytes:
            yield open_bucket
            open_bucket = filling[tensor.dtype] = []
        open_bucket.append((name, tensor))
    yield from (rest for rest in filling.values() if rest)


def layout_of(named: Sequence[Named]) -> WeightBucket:
    """What the tensors are, without checksums."""
    return WeightBucket(
        names=[name for name, _ in named],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        shapes=[list(tensor.shape) for _, tensor in named],
        checksums=[],
    )


class Staging:
    """Memory for one bucket on the CPU that is used again and again: new memory is written at half the speed."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """The first `num_bytes`, whose content is lost."""
        if self._flat.numel() < num_bytes:
            self._flat = torch.empty(num_bytes, dtype=torch.uint8)
        return self._flat[:num_bytes]


def pack(named: Sequence[Named], device: torch.device, *, staging: Staging | None = None) -> PackedBucket:
    """The tensors end to end, with the checksum of each as it is here.

    Args:
        device: of the buffer.
        staging: of a buffer on the CPU. None: new memory.
    """
    layout = layout_of(named)
    if device.type != "cpu":
        tensors = [tensor.detach().contiguous().to(device) for _, tensor in named]
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
        return PackedBucket(bucket=replace(layout, checksums=[checksum(t) for t in tensors]), flat=flat)
    flat = (staging or Staging()).take(sum(tensor.nbytes for _, tensor in named))
    into, start, checksums = bytes_of(flat), 0, []
    for _, tensor in named:
        checksums.append(copy_hashed(bytes_of(tensor.cpu()), into[start : start + tensor.nbytes]))
        start += tensor.nbytes
    return PackedBucket(bucket=replace(layout, checksums=checksums), flat=flat)


def copy_hashed(source: Bytes, target: Bytes) -> str:
    """Copies and returns the checksum of what is now in `target`. Both are [bytes]"""
    digests = []
    for start in range(0, source.size, BLOCK_BYTES):
        block = target[start : start + BLOCK_BYTES]
        block[:] = source[start : start + BLOCK_BYTES]
        digests.append(block_digest(block))  # still in cache
    return digest_of(digests, source.size)


def sizes_of(bucket: WeightBucket) -> list[int]:
    """The bytes of each tensor. Raises ValueError for a dtype that torch does not have."""
    return [dtype_of(d).itemsize * math.prod(s) for d, s in zip(bucket.dtypes, bucket.shapes, strict=True)]


def empty_flat(bucket: WeightBucket, device: torch.device) -> Tensor:
    """A buffer for the bytes of `bucket`."""
    return torch.empty(sum(sizes_of(bucket)), dtype=torch.uint8, device=device)


def unpack(bucket: WeightBucket, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a received buffer, as views."""
    tensors, start = {}, 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = dtype_of(dtype_name)
        end = start + dtype.itemsize * math.prod(shape)
        tensors[name] = flat[start:end].view(dtype).view(shape)
        start = end
    return tensors


def dtype_of(name: str) -> torch.dtype:
    """`torch.<name>`. Raises ValueError when there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a bucket's dtypes must be names of torch dtypes, got {name!r}")
    return dtype
