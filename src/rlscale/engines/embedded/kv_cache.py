"""Keys, values and states of prompts, and of the sequences of a decode batch, in memory that is allocated once.

Shape legend: L layers with keys and values, R rows (sequences * key-value heads), S cached positions, D head dimension,
P prompts, K key-value heads, T tokens of a padded prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.engines.embedded.delta_states import DeltaStates


@dataclass(frozen=True, eq=False, slots=True)
class PromptCache:
    """All that decoding a prompt needs of its tokens: keys and values [L, 2, P, K, T, D], and states.

    Keys and values of the padding are finite but undefined. States are those after the last token of each prompt.
    """

    values: Tensor
    states: DeltaStates | None = None  # of P sequences; None: the model has no linear attention

    def row(self, index: int) -> PromptCache:
        """The part of one prompt."""
        states = None if self.states is None else self.states.row(index)
        return PromptCache(self.values[:, :, index : index + 1], states)


class KvCache:
    """`values` is [L, 2 (keys, values), R, S, D]; `resize` changes S. A slot is the rows of one sequence.

    A product over a part of each row would first copy that part, so the rows are contiguous and move when S changes.
    They move inside memory for the largest S, whose pages the system provides at the first write: freeing and
    allocating the memory again costs more than moving the rows. `states` of linear attention do not depend on S.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        length: int,
        *,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        states: DeltaStates | None = None,
    ) -> None:
        """Creates a cache of zeros.

        Args:
            shape: (L, R, largest S, D).
            length: the initial S.
            num_heads: rows of a slot.
            states: one for each slot. None: the model has no linear attention.
        """
        self._num_layers, self._num_rows, self._limit, self._width = shape
        self._num_heads, self.states = num_heads, states
        self._memory = torch.zeros(self._size(self._limit), dtype=dtype, device=device)
        self.values = self._view(length)

    def rows(self, first: int, last: int | None = None) -> slice:
        """Rows of the slots [first, last), one row per KV head. `last` None: only of `first`."""
        return slice(first * self._num_heads, (first + 1 if last is None else last) * self._num_heads)

    def place(self, first: int, last: int, prompt: PromptCache, *, length: int) -> None:
        """Writes the first `length` tokens of one prompt into each slot of [first, last).

        Adjacent slots are written by one operator: launching it costs more than its work.
        """
        rows = self.rows(first, last)
        # Old values are masked, but 0 times NaN is NaN, so the values of earlier sequences are cleared.
        self.values[:, :, rows, length:] = 0
        self.values[:, :, rows, :length] = prompt.values[:, :, 0, :, :length].repeat(1, 1, last - first, 1, 1)
        if self.states is not None and prompt.states is not None:
            self.states.place(first, last, prompt.states)

    def move(self, source: int, target: int, *, used: int) -> None:
        """Copies the first `used` positions of a slot to another one, whose other positions become 0."""
        from_rows, to_rows = self.rows(source), self.rows(target)
        self.values[:, :, to_rows, :used] = self.values[:, :, from_rows, :used]
        self.values[:, :, to_rows, used:] = 0
        if self.states is not None:
            self.states.place(target, target + 1, self.states.row(source))

    def clear(self, slot: int) -> None:
        """Sets the states of a slot to zero. Its keys and values stay: masks hide them."""
        if self.states is not None:
            self.states.clear(slot)

    def resize(self, length: int, *, used: int) -> None:
        """Sets S to `length`. The first `used` rows keep the values that both lengths contain; new values are 0."""
        old, new = self.values, self._view(length)
        self.values = new
        if not used:
            return
        kept = min(length, old.shape[3])
        slabs = [(i, j) for i in range(self._num_layers) for j in (0, 1)]
        # The new range of a slab overlaps old ranges of others: growing moves the last slab first, shrinking the first.
        for i, j in reversed(slabs) if length > old.shape[3] else slabs:
            new[i, j, :used, :kept] = old[i, j, :used, :kept].clone()
        new[:, :, :used, kept:] = 0

    def _size(self, length: int) -> int:
        return self._num_layers * 2 * self._num_rows * length * self._width

    def _view(self, length: int) -> Tensor:
        return self._memory[: self._size(length)].view(self._num_layers, 2, self._num_rows, length, self._width)
