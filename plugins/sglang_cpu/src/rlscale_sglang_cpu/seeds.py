"""Supports `enable_deterministic_inference` on a CPU, so that each request is sampled with its `sampling_seed`.

SGLang allows the mode only for some attention backends, and replaces matrix products and sampling by kernels in Triton
and sgl_kernel. On a CPU, attention needs no special backend, sampling is written here in torch, and matrix products are
torch's own: samples depend on their seeds, while the last bits of logprobs may still depend on the rest of the batch.
"""

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "torch_native"

_WORD = 0xFFFFFFFF


def allow_deterministic_mode() -> None:
    """Adds the CPU attention backend to the allowed ones. Called in the process that checks the arguments."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])


def use_seeded_sampling() -> None:
    """Replaces the kernels of SGLang. Called in the processes that compute."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    import sglang.srt.layers.sampler as sampler

    batch_invariant_ops.enable_batch_invariant_mode = _log_mode
    sampler.multinomial_with_seed = multinomial_with_seed


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draws one token per row by the Gumbel-max trick, with MurmurHash3 of seed, position and token as in SGLang.

    Args:
        logprobs: [N, V], not necessarily normalised.
        seed, positions: [N].

    Returns: token ids, [N, 1].
    """
    hashed = murmur_hash32(seed, positions, torch.arange(logprobs.shape[1]))
    uniform = hashed.to(torch.float64) / _WORD
    # The clamp keeps log(0) and log(1) finite: argmax(logprob - log(E)) with E exponential is the Gumbel-max draw.
    exponential = -uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.to(torch.float64) - exponential.log()).argmax(dim=1, keepdim=True)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of the words seed low, seed high, position, column: [N], [N], [V] -> [N, V]."""
    words = (seed & _WORD, (seed >> 32) & _WORD, positions.long())
    h = torch.zeros_like(seed)
    for word in words:
        h = _mix(h, word)
    h = _mix(h[:, None], columns[None, :]) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _mix(h: Tensor, k: Tensor) -> Tensor:
    # 64-bit products wrap around, but their low 32 bits are correct.
    k = (_rotate((k * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & _WORD


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _WORD


def _log_mode(enable_bmm: bool = True) -> None:
    logger.info("deterministic inference on a CPU: samples by seed, matrix products of torch")
