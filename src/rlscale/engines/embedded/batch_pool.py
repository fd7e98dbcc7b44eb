"""The decode batches of an engine, one for each cache length."""

from collections.abc import Iterator

from rlscale.engines.embedded.decode_batch import DecodeBatch
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.requests import Sequence
from rlscale.engines.embedded.sampling import Workspace
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.models.batch_shapes import cache_length


class BatchPool:
    """Creates a decode batch when a cache length first occurs. Decode thread only."""

    def __init__(self, decoder: Decoder, options: SchedulerOptions) -> None:
        self._decoder, self._options = decoder, options
        self._batches: dict[int, DecodeBatch] = {}
        self.workspace = Workspace()  # one for all batches, which step one after the other

    @property
    def num_active(self) -> int:
        """Sequences in all slots. May be read from any thread."""
        return sum(batch.num_active for batch in list(self._batches.values()))

    def get(self, length: int) -> DecodeBatch:
        if length not in self._batches:
            options = self._options
            self._batches[length] = DecodeBatch(
                self._decoder,
                length,
                num_slots=options.slots_of(length),
                deterministic=options.deterministic,
                workspace=self.workspace,
            )
        return self._batches[length]

    def active(self) -> Iterator[DecodeBatch]:
        """Batches with sequences. The pool may change during the iteration."""
        return (batch for batch in list(self._batches.values()) if batch.num_active)

    def remove(self, sequence: Sequence) -> None:
        """Frees the slot of `sequence`, if it has one."""
        batch = self._batches.get(cache_length(sequence.request.total_len))
        if batch is not None and sequence in batch.sequences:
            batch.remove(sequence)

    def remove_all(self) -> Iterator[Sequence]:
        """Frees every slot, the last of each batch first, and yields its sequence."""
        for batch in self._batches.values():
            for sequence in reversed([s for s in batch.sequences if s is not None]):
                batch.remove(sequence)
                yield sequence

    def discard(self, batch: DecodeBatch) -> None:
        """Drops a batch whose state is unknown after a failure."""
        del self._batches[batch.length]

    def release(self) -> None:
        """Frees the memory of all caches; batches are created again when they are needed."""
        self._batches.clear()
        self.workspace = Workspace()
