"""Batch shapes of the embedded engine: the last bits of a result depend on them, and on nothing else in the batch.

A trainer that must reproduce these bits (`train.true_on_policy_mode`) computes in the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

PAD_STEP = 16
FIXED_TOKENS = 128
MIN_LENGTH = 32
MAX_CACHED_TOKENS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShapes:
    """Settings of an engine and of its requests that determine the shapes."""

    num_slots: int  # most rows of a decode batch
    max_new_tokens: int  # of a request
    max_cached_tokens: int = MAX_CACHED_TOKENS  # limits the rows of a decode batch of long sequences

    def decode_shape(self, prompt_len: int) -> tuple[int, int]:
        """KV cache length and rows of the decode batch for a prompt of this length."""
        length = cache_length(prompt_len + self.max_new_tokens)
        return length, slots_of(length, num_slots=self.num_slots, max_cached_tokens=self.max_cached_tokens)


def padded_len(length: int) -> int:
    """Length to which a prompt is padded; depends on the prompt alone."""
    # Rounded up to a multiple of PAD_STEP; long prompts are computed alone and need no bucket.
    return -(-length // PAD_STEP) * PAD_STEP if length <= FIXED_TOKENS else length


def fixed_rows(padded: int) -> int:
    """Rows of every deterministic prefill at this padded length, filled or not: about `FIXED_TOKENS` tokens in all.

    The last bits of a row change with the number of rows, so it must not depend on the number of waiting prompts.
    """
    return max(1, FIXED_TOKENS // padded)


def cache_length(total_len: int) -> int:
    """KV cache length for a request of `total_len` tokens: the next power of two, so that few batches serve all."""
    # bit_length(n - 1) is the exponent of the smallest power of two >= n.
    return max(MIN_LENGTH, 1 << (total_len - 1).bit_length())


def slots_of(length: int, *, num_slots: int, max_cached_tokens: int) -> int:
    """Rows of the decode batch of this KV cache length."""
    return max(1, min(num_slots, max_cached_tokens // length))
