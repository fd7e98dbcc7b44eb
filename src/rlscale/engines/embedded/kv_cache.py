"""Keys and values of the sequences of a decode batch, in memory that is allocated once.

Shape legend: L layers, R rows (sequences * key-value heads), S cached positions, D head dimension.
"""

import torch
from torch import Tensor


class KvCache:
    """`values` is [L, 2 (keys, values), R, S, D]; `resize` changes S.

    A product over a part of each row would first copy that part, so the rows are contiguous and move when S changes.
    They move inside memory for the largest S, whose pages the system provides at the first write: freeing and
    allocating the memory again costs more than moving the rows.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Creates a cache of zeros. `shape` is (L, R, largest S, D); `length` is the initial S."""
        self._num_layers, self._num_rows, self._limit, self._width = shape
        self._memory = torch.zeros(self._size(self._limit), dtype=dtype, device=device)
        self.values = self._view(length)

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
