"""A checksum of a tensor's bytes that any device computes with a few torch operations."""

from functools import lru_cache

import torch
from torch import Tensor

_MASK = 2**64 - 1
_ROW_WORDS = 1 << 14  # 128 KiB: a row and its products stay in cache
_SLAB_ROWS = 128
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd
_FOLD = 0xD1342543DE82EF95  # odd


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits that depend on every bit of the tensor's bytes and on their order.

    The bytes are read as 64-bit words x_i (zeros fill the last), cut into rows, and
    `row = sum_i x_i w_i`, `h = h * c + row` modulo 2^64, starting from the number of bytes, with odd w_i and c.
    A flipped bit changes one term by 2^k w_i, which is never 0 modulo 2^64; every later step is a bijection of h.
    Shape and dtype are not part of it.
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


def _words(data: Tensor) -> Tensor:
    # A view of a larger buffer may begin at an address that 64-bit words cannot have.
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _row_sums(words: Tensor) -> list[int]:
    factors = _factors(str(words.device))
    full = words.numel() // _ROW_WORDS
    rows = words[: full * _ROW_WORDS].view(full, _ROW_WORDS)
    sums = [(rows[i : i + _SLAB_ROWS] * factors).sum(dim=1) for i in range(0, full, _SLAB_ROWS)]
    rest = words[full * _ROW_WORDS :]
    if rest.numel():
        sums.append((rest * factors[: rest.numel()]).sum(dim=0, keepdim=True))
    return torch.cat(sums).cpu().tolist() if sums else []


@lru_cache(maxsize=16)
def _factors(device: str) -> Tensor:
    signed = _MULTIPLIER - 2**64
    # An odd number times an odd number is odd, also modulo 2^64.
    return ((2 * torch.arange(_ROW_WORDS, dtype=torch.int64) + 1) * signed).to(device)
