"""Computes prompts in batches whose rows do not influence each other's bits."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.requests import PrefillJob
from rlscale.engines.embedded.row_adapters import AdapterStacks, RowAdapters
from rlscale.models.batch_shapes import fixed_rows, padded_len

MAX_TOKENS = 1024  # more at once is no faster, and its memory would be freed and allocated each time


class Prefiller:
    """Runs prompts through the model, equal padded lengths in one batch."""

    def __init__(self, decoder: Decoder, *, deterministic: bool) -> None:
        self._decoder, self._deterministic = decoder, deterministic
        self._stacks = None if deterministic else AdapterStacks()
        self._features: dict[str, tuple[torch.Tensor, ...]] = {}  # of the images of the current jobs

    def run(self, jobs: Sequence[PrefillJob], *, state: object = None) -> None:
        """Sets `cache` and `logits` of every job, and `routes` if requested.

        Args:
            state: of the weights; features of images are kept until it changes.
        """
        tower = self._decoder.tower
        if tower is not None:
            images = [image for job in jobs for image in job.images]
            self._features = tower.features(images, state=state, is_fixed=self._deterministic)
        by_length: dict[int, list[PrefillJob]] = defaultdict(list)
        for job in jobs:
            by_length[padded_len(len(job.tokens))].append(job)
        for padded, alike in by_length.items():
            # A fixed number of rows for each length: the last bits of a row depend on it.
            max_rows = fixed_rows(padded) if self._deterministic else max(1, MAX_TOKENS // padded)
            for start in range(0, len(alike), max_rows):
                part = alike[start : start + max_rows]
                self._run_batch(part, padded, num_rows=max_rows if self._deterministic else len(part))
        self._features = {}

    def _run_batch(self, jobs: Sequence[PrefillJob], padded: int, *, num_rows: int) -> None:
        if not self._deterministic:
            padded = max(len(job.tokens) for job in jobs)
        ids = torch.zeros((num_rows, padded), dtype=torch.int64)
        lengths = torch.ones(num_rows, dtype=torch.int64)
        for row, job in enumerate(jobs):
            ids[row, : len(job.tokens)] = torch.tensor(job.tokens)
            lengths[row] = len(job.tokens)
        # Rows without a job keep one token 0, and their results are discarded; any adapter will do.
        device = self._decoder.device
        images, tower = {}, self._decoder.tower
        for row, job in enumerate(jobs):
            if job.images and tower is not None:
                images[row] = tower.prepare(job.tokens, job.images, self._features)
        rows = [job.adapter for job in jobs] + [jobs[0].adapter] * (num_rows - len(jobs))
        adapters = RowAdapters.from_rows(rows, device=device, repeat=padded, stacks=self._stacks)
        cache, logits = self._decoder.prefill(ids.to(device), lengths.to(device), images=images, adapters=adapters)
        for row, job in enumerate(jobs):
            job.cache, job.logits = cache.row(row), logits[row]
        if any(job.wants_routes for job in jobs):
            expert_ids = self._decoder.expert_ids()
            routes = expert_ids.view(num_rows, padded, *expert_ids.shape[1:]).numpy()
            for row, job in enumerate(jobs):
                job.routes = routes[row, : len(job.tokens)].copy() if job.wants_routes else None
