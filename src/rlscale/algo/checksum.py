"""Checksums of a tensor's bytes: XXH3 on a CPU, at memory speed, and a few torch operations on other devices."""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 1 << 19
"""Size of the blocks of a checksum. Half of a usual L2 cache, so that hashing a block that was just copied is free."""

DIGEST_BYTES = 8

_MASK = 2**64 - 1
_ROW_WORDS = 1 << 14  # 128 KiB: a row and its products stay in cache
_SLAB_ROWS = 128
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd
_FOLD = 0xD1342543DE82EF95  # odd


def checksum(tensor: Tensor) -> str:
    """Returns `<kind>:<16 hexadecimal digits>`, which depend on every bit of the tensor's bytes and on their order.

    On a CPU the kind is `xxh3` (see `digest_of`), elsewhere `fold`, which needs no copy to the CPU. Shape and dtype are
    not part of it.
    """
    return checksum_like(tensor, "xxh3" if tensor.device.type == "cpu" else "fold")


def checksum_like(tensor: Tensor, like: str) -> str:
    """Returns the checksum of the kind of `like`, which is a checksum or the name of a kind.

    Raises ValueError for an unknown kind.
    """
    kind = like.split(":")[0]
    compute = _KINDS.get(kind)
    if compute is None:
        raise ValueError(f"a checksum must begin with one of {', '.join(_KINDS)}, got {like!r}")
    return f"{kind}:{compute(tensor)}"


def bytes_of(tensor: Tensor) -> Bytes:
    """Bytes of a tensor on the CPU; a view if the tensor is contiguous. [bytes]"""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    # Not `data.numpy()`: torch can never release a storage that was exported that way.
    view: Bytes = np.from_dlpack(data).view(np.uint8)
    return view


def block_digest(block: Bytes) -> bytes:
    """XXH3 of one block. 8 bytes"""
    return xxhash.xxh3_64_digest(block.data)


def digest_of(blocks: Iterable[bytes], num_bytes: int) -> str:
    """Checksum of the bytes whose blocks of BLOCK_BYTES have these digests, in order.

    XXH3 of the digests and the number of bytes, so that blocks can be hashed in any order and by any process.
    """
    return f"xxh3:{_combine(blocks, num_bytes)}"


def _combine(blocks: Iterable[bytes], num_bytes: int) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(blocks) + num_bytes.to_bytes(8, "little"))


def _xxh3(tensor: Tensor) -> str:
    data = bytes_of(tensor.cpu())
    blocks = (block_digest(data[start : start + BLOCK_BYTES]) for start in range(0, data.size, BLOCK_BYTES))
    return _combine(blocks, data.size)


def _fold(tensor: Tensor) -> str:
    """`row = sum_i x_i w_i`, `h = h * c + row` modulo 2^64 over the 64-bit words x_i, zeros filling the last.

    It starts from the number of bytes; w_i and c are odd. A flipped bit changes one term by 2^k w_i, which is never 0
    modulo 2^64; every later step is a bijection of h.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    whole = num_bytes // 8
    h = num_bytes
    with torch.inference_mode():
        words = _words(data[: whole * 8])
        for row in _row_sums(words):
            h = (h * _FOLD + row) & _MASK
        if num_bytes % 8:
            tail = int.from_bytes(bytes(data[whole * 8 :].cpu().tolist()), "little")
            h = (h * _FOLD + tail * _MULTIPLIER) & _MASK
    return f"{h:016x}"


_KINDS: dict[str, Callable[[Tensor], str]] = {"xxh3": _xxh3, "fold": _fold}


def _words(data: Tensor) -> Tensor:
    # A view of a larger buffer may start at an address that is not aligned to 64 bits.
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _row_sums(words: Tensor) -> list[int]:
    factors = _factors(str(words.device))
    full = words.numel() // _ROW_WORDS
    rows = words[: full * _ROW_WORDS].view(full, _ROW_WORDS)
    sums = [(rows[i : i + _SLAB_ROWS] * factors).sum(dim=1) for i in range(0, full, _SLAB_ROWS)]
    tail = words[full * _ROW_WORDS :]
    if tail.numel():
        sums.append((tail * factors[: tail.numel()]).sum(dim=0, keepdim=True))
    return torch.cat(sums).cpu().tolist() if sums else []


@lru_cache(maxsize=16)
def _factors(device: str) -> Tensor:
    # torch has no unsigned multiplication; two's complement gives the same bits.
    signed = _MULTIPLIER - 2**64
    # An odd number times an odd number is odd, also modulo 2^64.
    return ((2 * torch.arange(_ROW_WORDS, dtype=torch.int64) + 1) * signed).to(device)
