"""The image tokens that a vision tower computes in a training step."""

from __future__ import annotations

from dataclasses import replace

from rlscale.config import RunConfig
from rlscale.plan.activations import MicrobatchSpec
from rlscale.plan.batches import Batches, Lengths


def with_images(work: MicrobatchSpec, config: RunConfig, batches: Batches, lengths: Lengths) -> MicrobatchSpec:
    """A micro-batch with its image tokens.

    How many tokens of a prompt are images is not known: the plan counts all of them, and different images in every
    sample of the micro-batch.
    """
    has_images = config.data.multimodal_keys is not None
    return replace(work, image_tokens=batches.samples_per_microbatch * lengths.prompt * has_images)
