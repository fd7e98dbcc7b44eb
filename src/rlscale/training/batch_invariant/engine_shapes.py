"""From a packed micro-batch to the shapes in which the engine computed it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlscale.models.batch_shapes import EngineShapes
from rlscale.training.batch_invariant.engine_rows import engine_rows
from rlscale.training.packing.microbatch import Microbatch
from rlscale.types import TrainBatch


def add_engine_shapes(micro: Microbatch, batch: TrainBatch, *, shapes: EngineShapes) -> Microbatch:
    """The same micro-batch, which says how the engine computed each of its tokens. Its prompts are not shared."""
    lengths_S = np.diff(batch.offsets)[micro.sample_indices]
    # One without a sample holds a single token in the place of one.
    lengths_S = np.minimum(lengths_S, micro.input_ids.shape[1])
    rows = engine_rows(
        lengths_S.astype(np.int64),
        np.minimum(batch.prompt_lens[micro.sample_indices], lengths_S).astype(np.int64),
        logit_rows_R=micro.logit_rows.cpu().numpy(),
        shapes=shapes,
        device=micro.input_ids.device,
    )
    return replace(micro, engine_rows=rows)
