"""Trainer logprobs of the few samples of a batch that the controller requests, for its logs.

Shape legend: N response tokens of the requested samples end to end, R trainable tokens of a micro-batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.packing.microbatch import Microbatch
from rlscale.types import Float32, Int64, TrainBatch


class LogprobCollector:
    """Collects logprobs on the rank that computes them anyway, so that no other number changes.

    Example:
        collector = LogprobCollector(batch)     # batch.logprob_samples == (0, 17)
        collector.add(micro, logprobs_R)        # on the rank that has the micro-batch
        collector.gather(device)                # on all ranks: {0: array, 17: array}
    """

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        starts = batch.offsets[:-1] + batch.prompt_lens
        self._rows = {i: np.arange(starts[i], batch.offsets[i + 1]) for i in batch.logprob_samples}
        rows = np.concatenate([np.empty(0, np.int64), *self._rows.values()])
        # Requested rows of the batch, ascending, and the index in N of each. Few rows are requested: an index for every
        # row of the batch would take more memory than its tokens.
        self._index_of_row: Int64 = np.argsort(rows)
        self._sorted_rows: Int64 = rows[self._index_of_row]
        self._found: list[tuple[Int64, Tensor]] = []

    def add(self, micro: Microbatch, logprobs: Tensor | None) -> None:
        """Keeps the requested logprobs [R] of one micro-batch. The first ones of a sample win."""
        if not self._rows:
            return
        assert logprobs is not None, "logprobs of a micro-batch are requested"
        rows = micro.batch_rows
        places = np.searchsorted(self._sorted_rows, rows)
        places = np.minimum(places, len(self._sorted_rows) - 1)
        is_requested = self._sorted_rows[places] == rows
        # An empty micro-batch holds one entry that belongs to a prompt: the loss mask drops it, on the host, because
        # reading the mask on the device would cost a transfer.
        kept = np.flatnonzero(is_requested & (self._batch.loss_mask[rows] > 0))
        if len(kept):
            entries = logprobs.detach()[torch.from_numpy(kept).to(logprobs.device)]
            self._found.append((self._index_of_row[places[kept]], entries))

    def gather(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> dict[int, Float32]:
        """Logprobs of each requested sample by its index, NaN where nothing was added.

        A collective of `group` (None: all ranks), whose ranks hold every sample exactly once.
        """
        if not self._rows:
            return {}
        lengths = [len(rows) for rows in self._rows.values()]
        sums = torch.zeros(2, sum(lengths))  # row 0: logprobs; row 1: 1 where there is one
        # In reverse, so that the first entries overwrite later ones.
        for indices, logprobs in reversed(self._found):
            sums[0, torch.from_numpy(indices)] = logprobs.float().cpu()
            sums[1, torch.from_numpy(indices)] = 1.0
        sums = sums.to(device)
        dist.all_reduce(sums, group=group)  # one rank has the sample, the others add zeros
        values, is_known = sums.cpu().numpy()
        values[is_known == 0] = np.nan
        return dict(zip(self._rows, np.split(values, np.cumsum(lengths)[:-1]), strict=True))
