"""Keys and values of the sequences that decode together, in memory that stays.

Shape legend: L layers, R rows (sequences * key-value heads), S cached positions, D head dimension.
"""

import torch
from torch import Tensor


class Cache:
    """`values` is [L, 2 (keys, values), R, S, D]; `resize` changes S.

    A product over a part of each row would first copy that part, so the rows lie one after the other and move when S
    changes. They move inside memory for the largest S, which the system hands out only as it is first written: to give
    it back and to take it anew cost more than to move the rows.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Args: shape: (L, R, largest S, D). length: S at first."""
        self._num_layers, self._num_rows, self._limit, self._width = shape
        self._memory = torch.zeros(self._size(self._limit), dtype=dtype, device=device)
        self.values = self._lay_out(length)

    def resize(self, length: int, *, used: int) -> None:
        """Makes S `length`. Values of the first `used` rows are kept where both lengths have them; new ones are 0."""
        old, new = self.values, self._lay_out(length)
        self.values = new
        if not used:
            return
        kept = min(length, old.shape[3])
        slabs = [(i, j) for i in range(self._num_layers) for j in (0, 1)]
        # A slab's new place overlaps the old ones of itself and of those that have moved before it.
        for i, j in reversed(slabs) if length > old.shape[3] else slabs:
            new[i, j, :used, :kept] = old[i, j, :used, :kept].clone()
        new[:, :, :used, kept:] = 0

    def _size(self, length: int) -> int:
        return self._num_layers * 2 * self._num_rows * length * self._width

    def _lay_out(self, length: int) -> Tensor:
        return self._memory[: self._size(length)].view(self._num_layers, 2, self._num_rows, length, self._width)
