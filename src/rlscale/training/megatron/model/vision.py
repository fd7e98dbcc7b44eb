"""Images on Megatron-core: the vision tower of transformers before the decoder, and its features inside of it.

    pixels ─ vision tower ─┬─ features ──────────────┐
                           └─ deepstack ─────────────┼──────────────┐
    token ids ─ embedding ───────────────────────────┴─ layer 0 ────┴─ layer 1 ─ ...

The first pipeline stage has the tower. Every tensor-parallel rank computes it whole from the same pixels and gets the
same gradients, so they are not summed. With sequence parallelism a rank has a part of the tokens and places the
features of this part: its gradients are a share, and they are summed with those of the norms.

Shape legend: T packed tokens of this rank, N image tokens among T, K layers with deepstack, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rlscale.training.megatron.model.attention import PackedSamples
from rlscale.training.megatron.model.layers import mark_sequence_parallel
from rlscale.training.modules.recompute import recompute_activations
from rlscale.training.packing.image_rows import PackedImages

TOWER = "vision_tower."
"""Prefix of the parameters of the vision tower and its projectors; the rest of a name is that of transformers."""


def build_tower(vision_config: PreTrainedConfig, *, config: TransformerConfig) -> PreTrainedModel:
    """Builds a vision tower with uninitialised weights on the current device.

    Args:
        vision_config: of the tower.
        config: of the decoder. Where it recomputes whole layers, blocks of the tower are recomputed, too.
    """
    make: Any = AutoModel.from_config  # transformers has no types here
    with no_init_weights():
        # Patches of an image see each other, so the packed attention of the decoder is no choice.
        tower: PreTrainedModel = make(vision_config, dtype=config.params_dtype, attn_implementation="sdpa")
    if config.recompute_granularity == "full":
        recompute_activations(tower)
    mark_copies(tower.parameters(), config)
    module: nn.Module = tower  # whose method has types
    module.to(torch.cuda.current_device())
    return tower


def mark_copies(parameters: Iterable[nn.Parameter], config: TransformerConfig) -> None:
    """Makes Megatron-core keep parameters of the tower, and of adapters in it, equal on all tensor-parallel ranks."""
    for parameter in parameters:
        mark_sequence_parallel(parameter, config)
        if torch.cuda.is_available() and not config.sequence_parallel:
            # Kernels of GPUs may add in another order on each rank, which would let the copies drift apart.
            # Megatron-core averages such gradients; gloo cannot, and on CPUs they are equal to the bit.
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


def image_features(tower: PreTrainedModel, images: PackedImages) -> tuple[Tensor, Tensor | None]:
    """The features of image tokens, [N, H], and those that deepstack adds later, [K, N, H], or None."""
    found: Any = tower(images.pixels.to(tower.dtype), grid_thw=images.grids, return_dict=True)
    deepstack = getattr(found, "deepstack_features", None)
    later = torch.stack([each[images.features] for each in deepstack]) if deepstack else None
    return found.pooler_output[images.features], later


class DeepstackLayer(TransformerLayer):  # type: ignore[misc]  # Megatron-core has no types
    """A decoder layer to whose output the features of images are added, if there are any for it.

    They arrive as `context`, which Megatron-core passes to every layer, also to one that is recomputed.
    """

    def forward(
        self,
        hidden_states: Tensor,
        *,
        context: Tensor | None = None,
        packed_seq_params: PackedSamples | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] and the context [K, N, H] -> the same shapes."""
        output, context = super().forward(
            hidden_states=hidden_states, context=context, packed_seq_params=packed_seq_params, **options
        )
        index = self.layer_number - 1  # in the whole model, whose first layers are on the stage of the tower
        if context is not None and index < len(context):
            assert packed_seq_params is not None and packed_seq_params.images is not None, "context belongs to images"
            output = output.index_add(0, packed_seq_params.images.rows, context[index].unsqueeze(1))
        return output, context
