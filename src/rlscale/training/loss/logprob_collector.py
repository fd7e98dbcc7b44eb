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
        # Row of the batch -> index in N, -1 for rows that are not requested.
        self._index_of_row: Int64 = np.full(len(batch.tokens), -1, dtype=np.int64)
        if self._rows:
            rows = np.concatenate(list(self._rows.values()))
            self._index_of_row[rows] = np.arange(len(rows))
        self._found: list[tuple[Int64, Tensor]] = []

    def add(self, micro: Microbatch, logprobs: Tensor | None) -> None:
        """Keeps the requested logprobs [R] of one micro-batch. The first ones of a sample win."""
        if not self._rows:
            return
        assert logprobs is not None, "logprobs of a micro-batch are requested"
        indices = self._index_of_row[micro.batch_rows]
        # An empty micro-batch holds one entry that belongs to a prompt: the loss mask drops it, on the host, because
        # reading the mask on the device would cost a transfer.
        kept = np.flatnonzero((indices >= 0) & (self._batch.loss_mask[micro.batch_rows] > 0))
        if len(kept):
            self._found.append((indices[kept], logprobs.detach()[torch.from_numpy(kept).to(logprobs.device)]))

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
