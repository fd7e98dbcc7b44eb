"""Named tensors cut into buckets, each one flat buffer of bytes: one request and one broadcast a bucket.

The layout is SGLang's `load_format="flattened_bucket"`: the bytes of the tensors end to end, in the order of the names.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.types import WeightBucket
from rlscale.weights.checksum import checksum

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


def pack(named: list[Named], device: torch.device) -> PackedBucket:
    """The tensors end to end, with the checksum of each as it is here."""
    tensors = [tensor.detach().contiguous() for _, tensor in named]
    bucket = WeightBucket(
        names=[name for name, _ in named],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
        checksums=[checksum(tensor) for tensor in tensors],
    )
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
    return PackedBucket(bucket=bucket, flat=flat.to(device))


def empty_flat(bucket: WeightBucket, device: torch.device) -> Tensor:
    """A buffer for the bytes of `bucket`."""
    sizes = [_dtype(d).itemsize * math.prod(s) for d, s in zip(bucket.dtypes, bucket.shapes, strict=True)]
    return torch.empty(sum(sizes), dtype=torch.uint8, device=device)


def unpack(bucket: WeightBucket, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a received buffer, as views."""
    tensors, start = {}, 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = _dtype(dtype_name)
        end = start + dtype.itemsize * math.prod(shape)
        tensors[name] = flat[start:end].view(dtype).view(shape)
        start = end
    return tensors


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a bucket's dtypes must be names of torch dtypes, got {name!r}")
    return dtype
