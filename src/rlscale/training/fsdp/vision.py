"""Forward pass of models with images, over packed samples whose placeholders are known.

    pixels ─ vision tower and projector of transformers ─ features ─┐
    token ids ─ embedding ──────────────────────────────────────────┴─ decoder of transformers ─ output layer

transformers' own forward finds the placeholders by their token id; here the batch names the tokens that have features,
so that a placeholder which the model generated stays text, and samples of a group share the features of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlscale.architectures.family import find_family
from rlscale.training.packing.image_rows import PackedImages


def use_vision_forward(model: PreTrainedModel) -> bool:
    """Replaces the forward method of a model with images, in place; returns whether it has any.

    Args:
        model: not sharded yet: FSDP calls this method after it has gathered the weights.
    """
    if find_family(model.config.model_type).vision is None:
        return False
    model.forward = partial(_forward, model)
    return True


def _forward(
    model: Any,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    images: PackedImages | None,
    logits_to_keep: Tensor,
    use_cache: bool = False,
    **packing: Any,
) -> CausalLMOutputWithPast:
    """Logits of some rows.

    Args:
        model: of transformers.
        input_ids: [1, T]
        position_ids: of the text, and of frames, rows and columns. [4, 1, T]
        images: of the micro-batch; None: a batch without any, in a model that is not sharded.
        logits_to_keep: rows. [R]
        use_cache: always False.
        packing: arguments of the attention.
    """
    embedded = model.get_input_embeddings()(input_ids)
    deepstack: dict[str, Any] = {}
    if images is not None:
        found = model.model.get_image_features(images.pixels, images.grids, return_dict=True)
        features = torch.cat(list(found.pooler_output)).to(embedded.dtype)
        embedded = embedded.index_copy(1, images.rows, features[images.features].unsqueeze(0))
        if getattr(found, "deepstack_features", None) is not None:
            is_image = torch.zeros(input_ids.shape, dtype=torch.bool, device=input_ids.device)
            is_image[0, images.rows] = True
            deepstack["visual_pos_masks"] = is_image
            # In ascending order of the rows, as the mask selects them.
            deepstack["deepstack_visual_embeds"] = [_joined(f)[images.features] for f in found.deepstack_features]
    output = model.model.language_model(
        inputs_embeds=embedded, position_ids=position_ids, use_cache=use_cache, **deepstack, **packing
    )
    logits = model.lm_head(output.last_hidden_state[:, logits_to_keep])
    return CausalLMOutputWithPast(logits=logits)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images of one layer. [features, D]

    One tensor up to transformers 5.17, a tensor for each image in later versions.
    """
    return features if isinstance(features, Tensor) else torch.cat(list(features))
