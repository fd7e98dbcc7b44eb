"""Logprobs of the tokens of given prompts: what a teacher of distillation is asked for.

Shape legend: P prompts, T tokens of a padded prompt, N scored tokens of one prompt, V vocabulary.
"""

import logging
import math
from collections import deque

import torch
from torch import Tensor

from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.inbox import FAILED_STATUS
from rlscale.engines.embedded.open_requests import OpenRequests
from rlscale.engines.embedded.prefill import MAX_TOKENS
from rlscale.engines.embedded.requests import Request
from rlscale.engines.embedded.row_adapters import RowAdapters
from rlscale.engines.embedded.vision_tower import ImageInput
from rlscale.engines.server.generate_request import PromptScores, Refused
from rlscale.models.batch_shapes import fixed_rows, padded_len

log = logging.getLogger(__name__)

MAX_LOGITS = 2**24  # that exist at a time, in numbers


class PromptScorer:
    """Queue of requests for input logprobs, which need no slot: one batch of them runs between two decode steps.

    Decode thread only.
    """

    def __init__(self, decoder: Decoder, requests: OpenRequests, *, deterministic: bool) -> None:
        self._decoder, self._requests, self._deterministic = decoder, requests, deterministic
        self._waiting: deque[Request] = deque()

    @property
    def is_empty(self) -> bool:
        return not any(request.num_open for request in self._waiting)

    def add(self, request: Request) -> None:
        """Appends a request with `logprob_start`."""
        self._waiting.append(request)

    def step(self, *, state: object = None) -> None:
        """Scores the first waiting requests of equal padded length, and finishes or fails them.

        Args:
            state: of the weights; features of images are kept until it changes.
        """
        batch, padded = self._take_batch()
        if not batch:
            return
        try:
            self._run(batch, padded, self._images(batch, state))
        except Exception as e:
            log.exception("input logprobs failed")
            error = Refused(f"input logprobs failed: {type(e).__name__}: {e}", status=FAILED_STATUS)
            for request in batch:
                self._requests.fail(request, error)

    def _take_batch(self) -> tuple[list[Request], int]:
        # Aborted and failed requests have no open sequence any more.
        waiting = [request for request in self._waiting if request.num_open]
        if not waiting:
            self._waiting.clear()
            return [], 0
        padded = padded_len(len(waiting[0].spec.input_ids))
        alike = [each for each in waiting if padded_len(len(each.spec.input_ids)) == padded]
        batch = alike[: fixed_rows(padded) if self._deterministic else max(1, MAX_TOKENS // padded)]
        self._waiting = deque(each for each in waiting if each not in batch)
        return batch, padded

    def _images(self, batch: list[Request], state: object) -> dict[int, ImageInput]:
        """The images of the rows that have some."""
        tower, rows = self._decoder.tower, {row: each.spec for row, each in enumerate(batch) if each.spec.images}
        if tower is None or not rows:
            return {}
        images = [image for spec in rows.values() for image in spec.images]
        features = tower.features(images, state=state, is_fixed=self._deterministic)
        return {row: tower.prepare(spec.input_ids, spec.images, features) for row, spec in rows.items()}

    def _run(self, batch: list[Request], padded: int, images: dict[int, ImageInput]) -> None:
        # The last bits of a row depend on the number of rows: a deterministic server has one number for each length.
        num_rows = fixed_rows(padded) if self._deterministic else len(batch)
        ids_PT = torch.zeros((num_rows, padded), dtype=torch.int64)
        lengths_P = torch.ones(num_rows, dtype=torch.int64)
        for row, request in enumerate(batch):
            ids_PT[row, : len(request.spec.input_ids)] = torch.tensor(request.spec.input_ids)
            lengths_P[row] = len(request.spec.input_ids)
        device = self._decoder.device
        # Rows without a request have any adapter, and no result.
        rows = [each.adapter for each in batch] + [batch[0].adapter] * (num_rows - len(batch))
        adapters = RowAdapters.from_rows(rows, device=device, repeat=padded)
        _, hidden = self._decoder.encode(ids_PT.to(device), lengths_P.to(device), images=images, adapters=adapters)
        for row, request in enumerate(batch):
            spec, first = request.spec, row * padded
            assert spec.logprob_start is not None, "only such requests are added"
            # The state at token t gives the distribution of token t + 1, so the last state is not needed.
            states = hidden[first + spec.logprob_start : first + len(spec.input_ids) - 1]
            targets_N = torch.tensor(spec.input_ids[spec.logprob_start + 1 :], dtype=torch.int64)
            self._finish(request, self._score(states, targets_N, num_top=spec.num_top_logprobs))

    def _score(self, states: Tensor, targets_N: Tensor, *, num_top: int) -> PromptScores:
        """Logprobs of the targets, and of the `num_top` most likely tokens, in parts that bound the memory."""
        logprobs: list[float] = []
        top: list[list[tuple[float, int]]] = []
        size = max(1, MAX_LOGITS // self._decoder.architecture.vocab_size)
        for start in range(0, len(targets_N), size):
            logits = self._decoder.logits(states[start : start + size]).float()
            logprobs_NV = torch.log_softmax(logits, dim=-1).cpu()
            targets = targets_N[start : start + size, None]
            logprobs += logprobs_NV.gather(1, targets)[:, 0].tolist()
            if num_top:
                values, ids = logprobs_NV.topk(num_top, dim=-1)
                top += [list(zip(*row, strict=True)) for row in zip(values.tolist(), ids.tolist(), strict=True)]
        return PromptScores(logprobs=logprobs, top=top)

    def _finish(self, request: Request, scores: PromptScores) -> None:
        if not all(map(math.isfinite, scores.logprobs)):
            error = "logprobs must be finite; the model's weights diverged"
            self._requests.fail(request, Refused(error, status=FAILED_STATUS))
            return
        request.scores = scores
        for sequence in request.sequences:
            if sequence.finish is None:
                self._requests.finish(sequence, {"type": "length", "length": 0})
