"""Lets `enable_deterministic_inference` work on a CPU, so that requests are drawn by their own `sampling_seed`.

SGLang allows the mode for some attention backends only, and then replaces matrix products and the drawing by kernels in
Triton and sgl_kernel. On a CPU attention runs sequence by sequence and needs no special backend, the drawing is written
here in torch, and the products stay torch's own: samples follow their seeds, while logprobs may still differ in their
last bits with the size of a batch.
"""

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "torch_native"

_WORD = 0xFFFFFFFF


def allow_mode() -> None:
    """For the process that checks the arguments."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])


def draw_by_seed() -> None:
    """For the processes that compute."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    import sglang.srt.layers.sampler as sampler

    batch_invariant_ops.enable_batch_invariant_mode = _tell
    sampler.multinomial_with_seed = multinomial_with_seed


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One draw a row by the Gumbel-max trick, its noise a MurmurHash3 of seed, position and token as in SGLang.

    Args:
        logprobs: [N, V], not necessarily normalised.
        seed, positions: [N].

    Returns: token ids, [N, 1].
    """
    hashed = murmur_hash32(seed, positions, torch.arange(logprobs.shape[1]))
    uniform = hashed.to(torch.float64) / _WORD
    exponential = -uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.to(torch.float64) - exponential.log()).argmax(dim=1, keepdim=True)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of the four words seed low, seed high, position, column. [N], [N], [V] -> [N, V]"""
    words = (seed & _WORD, (seed >> 32) & _WORD, positions.long())
    h = torch.zeros_like(seed)
    for word in words:
        h = _mix(h, word)
    h = _mix(h[:, None], columns[None, :]) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _mix(h: Tensor, k: Tensor) -> Tensor:
    # 64-bit products wrap, and their low words are right all the same.
    k = (_rotate((k * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & _WORD


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _WORD


def _tell(enable_bmm: bool = True) -> None:
    logger.info("deterministic inference on a CPU: samples by seed, matrix products of torch")
