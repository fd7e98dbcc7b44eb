"""Lets a server on a CPU return the experts of its tokens (`enable_return_routed_experts`).

SGLang stores them in host memory that it registers with CUDA for fast copies. Without CUDA neither the registration
nor the copy is possible.
"""

import torch
from torch import Tensor


def use_plain_memory() -> None:
    """Replaces the allocator of host memory. Called in the processes that compute."""
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
    """Allocates a tensor like SGLang's other functions of this table, but neither pinned nor registered."""
    return torch.empty(dims, dtype=dtype, device=device)
