"""Slots that decode together over one cache length."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.kv_cache import PromptCache
from rlscale.engines.embedded.requests import Sequence
from rlscale.engines.embedded.row_adapters import AdapterStacks, RowAdapters
from rlscale.engines.embedded.sampling import RowParams, Workspace, draw

GROWTH = 32  # positions by which the cache of a compact batch grows


class DecodeBatch:
    """Sequences of one cache length, one slot each.

    Invariant (deterministic): every step computes all slots over the whole length, so that shapes, on which the last
    bits of a row depend, never depend on other requests. Otherwise the batch is compact: used slots are kept at the
    front, only they are computed, and the cache is as long as the longest of them needs.
    """

    def __init__(
        self, decoder: Decoder, length: int, *, num_slots: int, deterministic: bool, workspace: Workspace | None = None
    ) -> None:
        self.length, self.num_slots = length, num_slots
        self._decoder, self._deterministic = decoder, deterministic
        self._workspace = workspace or Workspace()
        self._num_heads = decoder.architecture.expanded_heads
        shortest = length if deterministic else min(length, GROWTH)
        self._cache = decoder.new_cache(num_slots, length, shortest)
        self._make_mask(shortest)
        self._ids = np.zeros(num_slots, np.int64)
        self._positions = np.zeros(num_slots, np.int64)  # of the token in `_ids`
        self._rotary_offsets = np.zeros(num_slots, np.int64)  # see `Request.rotary_offset`
        self._params = RowParams(num_slots)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._adapters: RowAdapters | None = None
        self._stacks = None if deterministic else AdapterStacks()
        self._has_moved = False  # whether `_adapters` are those of earlier slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_slots - len(self._free)

    def place(self, sequences: Iterable[Sequence], cache: PromptCache, length: int) -> None:
        """Assigns a slot to each sequence. `cache`, of one prompt, holds all their `length` tokens but the last."""
        if not self._deterministic:
            self._fit(length)
        slots = []
        self._has_moved = True
        for sequence in sequences:
            slot = self._free.pop()
            slots.append(slot)
            self._ids[slot], self._positions[slot] = sequence.ids[-1], length
            self._rotary_offsets[slot] = sequence.request.rotary_offset
            sequence.set_params(self._params, slot)
            self.sequences[slot] = sequence
        for first, last in _runs(slots):
            self._cache.place(first, last, cache, length=length)
            rows = self._cache.rows(first, last)
            self._mask[rows, :, :length] = 0
            self._mask[rows, :, length:] = -torch.inf

    def remove(self, sequence: Sequence) -> None:
        """Frees the slot of `sequence`."""
        slot = self.sequences.index(sequence)
        self._has_moved = True
        if self._deterministic:  # the slot is still computed, so it must attend to something
            rows = self._cache.rows(slot)
            self._mask[rows, :, 0] = 0
            self._mask[rows, :, 1:] = -torch.inf
        else:
            slot = self._move_last_to(slot)
        self._cache.clear(slot)
        self.sequences[slot] = None
        self._ids[slot] = self._positions[slot] = self._rotary_offsets[slot] = 0
        self._params.clear(slot)
        self._free.append(slot)

    def step(self) -> list[tuple[Sequence, int, float]]:
        """Decodes one token for each sequence: (sequence, token, logprob)."""
        num = self.num_slots
        if not self._deterministic:
            num = self.num_active
            self._fit(int(self._positions[:num].max()))
        ids, positions = self._ids[:num], self._positions[:num]
        device = self._decoder.device
        # Flat indices into the mask of the position that each row writes now, and may attend to from now on.
        write = torch.from_numpy((self._starts[:num] + positions[:, None]).reshape(-1)).to(device)
        self._mask.view(-1).index_fill_(0, write, 0.0)
        logits = self._decoder.decode(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions + self._rotary_offsets[:num]).to(device),
            self._cache,
            write=write,
            mask=self._mask[: len(write)],
            adapters=self._row_adapters(num),
        )
        tokens, logprobs = draw(logits, self._params, positions + 1, self._workspace)
        active = [slot for slot in range(num) if self.sequences[slot] is not None]
        self._keep_routes(active)
        self._ids[active] = tokens[active]
        self._positions[active] += 1
        drawn = zip(active, tokens[active].tolist(), logprobs[active].tolist(), strict=True)
        return [(self._sequence(slot), token, logprob) for slot, token, logprob in drawn]

    def _row_adapters(self, num: int) -> RowAdapters | None:
        if self._has_moved:
            pinned = {slot: s.request.adapter for slot, s in enumerate(self.sequences[:num]) if s is not None}
            # The results of free slots are discarded: they take any adapter, so that most steps need no masks.
            default = next(iter(pinned.values()))
            rows = [pinned.get(slot, default) for slot in range(num)]
            self._adapters = RowAdapters.from_rows(rows, device=self._decoder.device, stacks=self._stacks)
            self._has_moved = False
        return self._adapters

    def _keep_routes(self, active: list[int]) -> None:
        """Stores the experts of the input tokens for sequences that requested routes."""
        wanting = [slot for slot in active if self._sequence(slot).wants_routes]
        if wanting:
            expert_ids = self._decoder.expert_ids().numpy()
            for slot in wanting:
                self._sequence(slot).routes.append(expert_ids[slot : slot + 1])

    # -- the cache

    def _make_mask(self, length: int) -> None:
        """Creates a mask that hides everything, and the flat index at which each row of it starts."""
        decoder, num_rows = self._decoder, self.num_slots * self._num_heads
        self._mask = torch.full((num_rows, 1, length), -torch.inf, dtype=decoder.dtype, device=decoder.device)
        self._mask[:, :, 0] = 0  # an unused slot attends to its own token: softmax over nothing is NaN
        self._starts = (np.arange(num_rows, dtype=np.int64) * length).reshape(self.num_slots, self._num_heads)

    def _fit(self, position: int) -> None:
        """Grows the cache so that `position` fits, and shrinks it again once it is empty."""
        length = self._mask.shape[-1]
        needed = min(self.length, -(-(position + 1) // GROWTH) * GROWTH)
        if length >= needed and (self.num_active > 0 or length == needed):
            return
        old_mask, used = self._mask, self.num_active * self._num_heads
        self._cache.resize(needed, used=used)
        self._make_mask(needed)
        if used:
            self._mask[:used, :, :length] = old_mask[:used]

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} must hold a sequence"
        return sequence

    def _move_last_to(self, slot: int) -> int:
        """Moves the last used slot to `slot`, so that used slots stay at the front; returns the slot that is free."""
        last = self.num_active - 1
        if last != slot:
            self._cache.move(last, slot, used=int(self._positions[last]) + 1)
            self._mask[self._cache.rows(slot)] = self._mask[self._cache.rows(last)]
            columns: tuple[npt.NDArray[np.int64], ...] = (self._ids, self._positions, self._rotary_offsets)
            for column in columns:
                column[slot] = column[last]
            self._params.copy(last, slot)
            self.sequences[slot] = self.sequences[last]
        return last


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges (first, last + 1) of adjacent slots."""
    ordered = sorted(slots)
    first = 0
    for i, slot in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != slot + 1:
            yield ordered[first], slot + 1
            first = i + 1
