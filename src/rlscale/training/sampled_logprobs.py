"""Logprobs of a few samples of a batch, which the controller asked for.

Shape legend: N response tokens of the asked samples laid end to end, R trainable tokens of a micro-batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.packing.microbatch import Microbatch
from rlscale.types import Float32, Int64, TrainBatch


class LogprobCollector:
    """Collects them on whichever rank computes them. Computes nothing itself, so that no other number can change.

    Example:
        asked = LogprobCollector(batch)        # batch.logprob_samples == (0, 17)
        asked.add(micro, logprobs_R)        # on the rank that has the micro-batch
        asked.gather(device)                # on all ranks: {0: array, 17: array}
    """

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        starts = batch.offsets[:-1] + batch.prompt_lens
        self._rows = {i: np.arange(starts[i], batch.offsets[i + 1]) for i in batch.logprob_samples}
        self._position: Int64 = np.full(len(batch.tokens), -1, dtype=np.int64)  # row of the batch -> place in N
        if self._rows:
            rows = np.concatenate(list(self._rows.values()))
            self._position[rows] = np.arange(len(rows))
        self._found: list[tuple[Int64, Tensor]] = []

    def add(self, micro: Microbatch, logprobs: Tensor | None) -> None:
        """Keeps what is asked for of one micro-batch. `logprobs` is [R]; a sample's first ones stay."""
        if not self._rows:
            return
        assert logprobs is not None, "logprobs of a micro-batch are asked for"
        places = self._position[micro.batch_rows]
        # An empty micro-batch holds one entry that belongs to a prompt; the mask on the device would cost a transfer.
        kept = np.flatnonzero((places >= 0) & (self._batch.loss_mask[micro.batch_rows] > 0))
        if len(kept):
            self._found.append((places[kept], logprobs.detach()[torch.from_numpy(kept).to(logprobs.device)]))

    def gather(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> dict[int, Float32]:
        """The logprobs of every asked sample by its index, NaN where nothing was added; a collective.

        `group` are ranks that have all samples between them, each once; None: all ranks.
        """
        if not self._rows:
            return {}
        lengths = [len(rows) for rows in self._rows.values()]
        both = torch.zeros(2, sum(lengths))  # logprobs, and 1 where there is one
        for places, logprobs in reversed(self._found):
            both[0, torch.from_numpy(places)] = logprobs.float().cpu()
            both[1, torch.from_numpy(places)] = 1.0
        both = both.to(device)
        dist.all_reduce(both, group=group)  # every sample is on one rank, the others add zeros
        values, known = both.cpu().numpy()
        values[known == 0] = np.nan
        return dict(zip(self._rows, np.split(values, np.cumsum(lengths)[:-1]), strict=True))
