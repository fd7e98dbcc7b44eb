"""Settings of the decode loop."""

from dataclasses import dataclass

from rlscale.models.batch_shapes import MAX_CACHED_TOKENS, cache_length, slots_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """Sizes of decode batches. Answers depend on them only in their last bits."""

    num_slots: int = 64  # rows of a decode batch
    max_cached_tokens: int = MAX_CACHED_TOKENS  # of a decode batch: with long sequences it has fewer rows
    deterministic: bool = True
    num_threads: int | None = None  # of torch, in the decode thread; None: torch's default
    seed: int = 0  # of the seeds that requests without one get
    eos_ids: frozenset[int] = frozenset()
    max_adapters: int | None = None  # versions of all adapters, on a base that several senders share; None: no limit

    def slots_of(self, length: int) -> int:
        """Rows of the decode batch with this cache length. Depends on the options alone."""
        return slots_of(length, num_slots=self.num_slots, max_cached_tokens=self.max_cached_tokens)

    def total_cache_tokens(self, max_context_len: int) -> int:
        """Tokens that the largest decode batch keeps, that of the longest requests."""
        # Requests of another cache length have their own batch and its memory, so that all together keep more.
        length = cache_length(max_context_len)
        return self.slots_of(length) * length
