"""Order of the rows of prompt files: epochs of one table, or of several files in proportion to weights."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_LISTED = 1 << 18
"""Rows up to which an epoch is a shuffled list; a longer one is an array, of 4 bytes for each row."""


class EpochOrder:
    """Numbers of rows, epoch after epoch.

    Invariant: every epoch has each row once; its order depends on the seed and the number of the epoch alone, so that
    a position of two integers restores it.
    """

    def __init__(self, rows: Sequence[int], *, seed: int, shuffle: bool, name: str = "") -> None:
        """Args:
        rows: numbers of the rows of an epoch, in the order of the files.
        name: distinguishes orders of the same seed; empty: the only one.
        """
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._name = f"/{name}" if name else ""
        self.epoch, self.position = 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, number: int) -> list[int]:
        """The next rows; continues with the next epoch at the end of one."""
        found: list[int] = []
        # Each pass takes the remaining rows of the epoch at most.
        while len(found) < number:
            if self.position == len(self):
                self.seek(self.epoch + 1, 0)
            end = min(len(self), self.position + number - len(found))
            found += [self._rows[int(place)] for place in self._order[self.position : end]]
            self.position = end
        return found

    def seek(self, epoch: int, position: int) -> None:
        """Continues at a position of an epoch."""
        if epoch != self.epoch:
            self._order = self._epoch_order(epoch)
        self.epoch, self.position = epoch, position

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        places = range(len(self))
        if not self._shuffle:
            return places
        # A new generator per epoch: a resumed run restores the order from the number of the epoch alone.
        name = f"{self._seed}/{epoch}{self._name}"
        if len(places) <= MAX_LISTED:
            order = list(places)
            random.Random(name).shuffle(order)
            return order
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
        numbers: Any = np.arange(len(places), dtype=np.uint32 if len(places) < 1 << 32 else np.uint64)
        np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)
        found: Sequence[int] = numbers
        return found


class PlainOrder:
    """All rows in one epoch order."""

    def __init__(self, rows: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self._order = EpochOrder(rows, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self._order)

    def take(self, number: int) -> list[int]:
        """The next rows."""
        return self._order.take(number)

    def give_up(self, rows: Sequence[int]) -> None:
        """Marks rows that gave no prompt; the next ones replace them."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._order.epoch, "position": self._order.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.seek(state["epoch"], state["position"])


class WeightedOrder:
    """Rows of several files in proportion to weights, whatever the sizes of the files.

    Each file has its own epochs. The next prompt is one of the file that lacks most of its share, so that every prefix
    has the shares as closely as whole prompts allow. An epoch of the whole is as many prompts as all files have.
    """

    def __init__(self, files: Sequence[Sequence[int]], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._files = [
            EpochOrder(rows, seed=seed, shuffle=shuffle, name=str(number)) for number, rows in enumerate(files)
        ]
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._num_taken = [0] * len(files)  # prompts of each file
        self._file_of_row: dict[int, int] = {}  # of the rows that were taken last

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def take(self, number: int) -> list[int]:
        """The next rows."""
        chosen = []
        for _ in range(number):
            total = sum(self._num_taken) + 1
            lacking = [share * total - taken for share, taken in zip(self._shares, self._num_taken, strict=True)]
            file = max(range(len(lacking)), key=lacking.__getitem__)
            self._num_taken[file] += 1
            chosen.append(file)
        rows = [self._files[file].take(1)[0] for file in chosen]
        self._file_of_row = dict(zip(rows, chosen, strict=True))
        return rows

    def give_up(self, rows: Sequence[int]) -> None:
        """Marks rows that gave no prompt; others of their files replace them."""
        for row in rows:
            self._num_taken[self._file_of_row[row]] -= 1

    def state_dict(self) -> dict[str, Any]:
        total = sum(self._num_taken)
        files = [
            {"epoch": file.epoch, "position": file.position, "num_prompts": taken}
            for file, taken in zip(self._files, self._num_taken, strict=True)
        ]
        return {"epoch": total // len(self), "position": total % len(self), "files": files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for file, saved in zip(self._files, state["files"], strict=True):
            file.seek(saved["epoch"], saved["position"])
        self._num_taken = [saved["num_prompts"] for saved in state["files"]]
