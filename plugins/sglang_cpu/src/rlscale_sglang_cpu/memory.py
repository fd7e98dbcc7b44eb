"""Lets a server on a CPU return the experts of its tokens (`enable_return_routed_experts`).

SGLang keeps them in memory of the host that it registers with CUDA for fast copies. Without CUDA there is nothing to
register it with, and nothing to copy from.
"""

import torch
from torch import Tensor


def take_plain_memory() -> None:
    """For the processes that compute."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = plain_memory


def plain_memory(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: object,
    registration_granularity_bytes: int | None = None,
) -> Tensor:
    """A tensor as SGLang's other functions of this table give it, but neither pinned nor registered."""
    return torch.empty(dims, dtype=dtype, device=device)
