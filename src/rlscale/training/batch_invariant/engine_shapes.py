"""Adds the batch shapes of the engine to a packed micro-batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlscale.models.batch_shapes import EngineShapes
from rlscale.training.batch_invariant.engine_rows import engine_rows
from rlscale.training.packing.microbatch import Microbatch
from rlscale.types import TrainBatch


def add_engine_shapes(micro: Microbatch, batch: TrainBatch, *, shapes: EngineShapes) -> Microbatch:
    """The same micro-batch with `engine_rows`. Its prompts must not be shared."""
    lengths_S = np.diff(batch.offsets)[micro.sample_indices]
    # A micro-batch without samples holds a single token of one.
    lengths_S = np.minimum(lengths_S, micro.input_ids.shape[1])
    rows = engine_rows(
        lengths_S.astype(np.int64),
        np.minimum(batch.prompt_lens[micro.sample_indices], lengths_S).astype(np.int64),
        logit_rows_R=micro.logit_rows.cpu().numpy(),
        shapes=shapes,
        device=micro.input_ids.device,
    )
    return replace(micro, engine_rows=rows)
