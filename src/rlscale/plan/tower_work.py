"""The work of a vision tower in a training step: its trained weights, and the image tokens of a micro-batch."""

from __future__ import annotations

import re
from dataclasses import replace

from rlscale.architectures.tower_shape import PREFIX, TowerShape
from rlscale.config import RunConfig
from rlscale.plan.batches import Batches, Lengths
from rlscale.plan.fsdp_memory import TrainerWork


def with_tower(
    work: TrainerWork, tower: TowerShape, config: RunConfig, batches: Batches, lengths: Lengths
) -> TrainerWork:
    """The work of a rank with that of the tower.

    How many tokens of a prompt are images is not known: the plan counts all of them, and different images in every
    sample of the micro-batch.
    """
    shapes = dict(tower.named_shapes())
    frozen = {name for name in shapes if not is_trained(name, config)}
    trained = [name.removeprefix(PREFIX).split(".") for name in shapes if name not in frozen]
    # A block saves nothing if neither it nor anything before it is trained.
    firsts = [int(parts[1]) if parts[0] == "blocks" else 0 for parts in trained if not _is_projector(parts[0])]
    has_images = config.data.multimodal_keys is not None
    return replace(
        work,
        frozen=tuple(shapes[name] for name in sorted(frozen)),
        tower_blocks=tower.depth - min(firsts) if firsts else 0,
        largest=replace(work.largest, image_tokens=batches.samples_per_microbatch * lengths.prompt * has_images),
    )


def is_trained(name: str, config: RunConfig) -> bool:
    """Whether `train.only_train_params` and `train.freeze_params` leave a weight trained, by its name."""
    only, frozen = config.train.only_train_params, config.train.freeze_params or []
    if only is not None:
        return any(re.search(pattern, name) for pattern in only)
    return not any(re.search(pattern, name) for pattern in frozen)


def _is_projector(part: str) -> bool:
    return "merger" in part
