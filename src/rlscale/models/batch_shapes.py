"""In which shapes the embedded engine computes a token: its last bits depend on them, and on nothing else in the batch.

A trainer that shall get the same bits (`train.true_on_policy_mode`) computes the token in the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

PAD_STEP = 16
FIXED_TOKENS = 128
MIN_LENGTH = 32
MAX_CACHED_TOKENS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShapes:
    """The figures of an engine and of its requests that shapes follow from."""

    num_slots: int  # rows of a lane
    max_new_tokens: int  # that a request asks for
    max_cached_tokens: int = MAX_CACHED_TOKENS  # a lane of long sequences has fewer rows, so that its cache is smaller

    def lane_of(self, prompt_len: int) -> tuple[int, int]:
        """Cache length and rows of the lane that answers a prompt of this length."""
        length = lane_length(prompt_len + self.max_new_tokens)
        return length, slots_of(length, num_slots=self.num_slots, max_cached_tokens=self.max_cached_tokens)


def padded_len(length: int) -> int:
    """Length to which a prompt is padded: it follows from the prompt alone."""
    return -(-length // PAD_STEP) * PAD_STEP if length <= FIXED_TOKENS else length


def fixed_rows(padded: int) -> int:
    """Rows of every deterministic prefill at this padded length, filled or not: about `FIXED_TOKENS` tokens in all.

    The last bits of a row change with the number of rows, so it may not follow from how many prompts are waiting.
    """
    return max(1, FIXED_TOKENS // padded)


def lane_length(total_len: int) -> int:
    """Cache length for a request of `total_len` tokens: the next power of two, so that few lanes serve all."""
    return max(MIN_LENGTH, 1 << (total_len - 1).bit_length())


def slots_of(length: int, *, num_slots: int, max_cached_tokens: int) -> int:
    """Rows of the lane of this cache length."""
    return max(1, min(num_slots, max_cached_tokens // length))
