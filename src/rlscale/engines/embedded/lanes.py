"""A lane: the slots that decode together over one cache length."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.sampling import RowParams, draw
from rlscale.engines.embedded.sequences import Sequence

MIN_LENGTH = 32
LENGTH_STEP = 32  # a compacted lane reads its cache up to a multiple of this


def lane_length(total_len: int) -> int:
    """Cache length for a request of `total_len` tokens: the next power of two, so that few lanes serve all."""
    return max(MIN_LENGTH, 1 << (total_len - 1).bit_length())


class Lane:
    """Sequences of one length class, one row of the batch each.

    Invariant (deterministic): every step computes all rows over the whole length, so that the shapes, on which the last
    bits of a row depend, never follow from what else is being decoded. Otherwise the used rows are kept at the front
    (compact) and only they are computed, up to the longest of them.
    """

    def __init__(self, decoder: Decoder, length: int, *, num_slots: int, deterministic: bool) -> None:
        self.length, self.num_slots = length, num_slots
        self._decoder, self._deterministic = decoder, deterministic
        self._cache = decoder.new_cache(num_slots, length)
        num_heads = decoder.architecture.num_kv_heads
        shape = (num_slots * num_heads, 1, length)
        self._mask = torch.full(shape, -torch.inf, dtype=decoder.dtype, device=decoder.device)
        self._mask[:, :, 0] = 0  # an unused row attends to its own token, or it would be NaN
        self._starts = (np.arange(num_slots * num_heads, dtype=np.int64) * length).reshape(num_slots, num_heads)
        self._ids = np.zeros(num_slots, np.int64)
        self._positions = np.zeros(num_slots, np.int64)  # of the token in `_ids`
        self._params = RowParams(num_slots)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_slots - len(self._free)

    def place(self, sequence: Sequence, cache: Tensor, length: int) -> None:
        """Gives `sequence` a slot. `cache` [L, 2, K, >= length, D] holds all its tokens but the last."""
        slot = self._free.pop()
        rows = self._rows(slot)
        # Old values are masked, but 0 times NaN would be NaN: nothing of an earlier sequence stays.
        self._cache[:, :, rows] = 0
        self._cache[:, :, rows, :length] = cache[:, :, :, :length]
        self._mask[rows, :, :length] = 0
        self._mask[rows, :, length:] = -torch.inf
        self._ids[slot], self._positions[slot] = sequence.ids[-1], length
        sequence.set_params(self._params, slot)
        self.sequences[slot] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Frees the slot of `sequence`."""
        slot = self.sequences.index(sequence)
        if not self._deterministic:
            slot = self._move_last_to(slot)
        self.sequences[slot] = None
        self._ids[slot] = self._positions[slot] = 0
        self._params.clear(slot)
        rows = self._rows(slot)
        self._mask[rows, :, 0] = 0
        self._mask[rows, :, 1:] = -torch.inf
        self._free.append(slot)

    def step(self) -> list[tuple[Sequence, int, float]]:
        """One more token for each sequence, with its logprob."""
        num = self.num_slots if self._deterministic else self.num_active
        ids, positions = self._ids[:num], self._positions[:num]
        length = self.length
        if not self._deterministic:
            length = min(length, -(-(int(positions.max()) + 1) // LENGTH_STEP) * LENGTH_STEP)
        device = self._decoder.device
        write = torch.from_numpy((self._starts[:num] + positions[:, None]).reshape(-1)).to(device)
        self._mask.view(-1).index_fill_(0, write, 0.0)
        logits = self._decoder.decode(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            self._cache,
            write=write,
            mask=self._mask[: len(write), :, :length],
        )
        tokens, logprobs = draw(logits, self._params, positions + 1)
        active = [slot for slot in range(num) if self.sequences[slot] is not None]
        self._ids[active] = tokens[active]
        self._positions[active] += 1
        drawn = zip(active, tokens[active].tolist(), logprobs[active].tolist(), strict=True)
        return [(self._sequence(slot), token, logprob) for slot, token, logprob in drawn]

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} must hold a sequence"
        return sequence

    def _rows(self, slot: int) -> slice:
        heads = self._decoder.architecture.num_kv_heads
        return slice(slot * heads, (slot + 1) * heads)

    def _move_last_to(self, slot: int) -> int:
        last = self.num_active - 1
        if last != slot:
            source, target = self._rows(last), self._rows(slot)
            used = int(self._positions[last]) + 1
            self._cache[:, :, target, :used] = self._cache[:, :, source, :used]
            self._cache[:, :, target, used:] = 0
            self._mask[target] = self._mask[source]
            columns: tuple[npt.NDArray[np.int64], ...] = (self._ids, self._positions)
            for column in columns:
                column[slot] = column[last]
            self._params.copy(last, slot)
            self.sequences[slot] = self.sequences[last]
        return last
