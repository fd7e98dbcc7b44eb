"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), which train apart from the model.

    token i      last hidden state ─ norm ┐
    token i + k  embedding ───────── norm ┴ projection ─ decoder layer ─ norm ─ output layer ─> token i + k + 1

Layer k takes the hidden state of layer k - 1; the first one that of the model, after its final norm. No gradient
reaches the model, its embedding or its output layer, so that the loss of these layers does not change the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rlscale.training.megatron.model.attention import PackedSamples


class DetachedMtpLayer(MultiTokenPredictionLayer):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's layer without a gradient to the model."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids of the next tokens, positions, embeddings of these tokens, and the hidden states of the layer before."""
        later = packed_seq_params.later_ids if isinstance(packed_seq_params, PackedSamples) else ()
        with torch.no_grad():
            if later:
                # Megatron-core would roll sample by sample, and wait for the device at each of them.
                input_ids = later[self.layer_number - 1]
                embedded = embedding(input_ids=input_ids, position_ids=position_ids)
            else:
                input_ids, position_ids, embedded, _ = super()._get_embeddings(
                    input_ids, position_ids, embedding, hidden_states, packed_seq_params
                )
        if self.layer_number == 1:
            # Recomputation gives a layer no gradient where its input requires none.
            hidden_states = hidden_states.detach().requires_grad_()
        return input_ids, position_ids, embedded, hidden_states

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """Recomputes the layer in the backward pass. Megatron-core 0.16 takes tensors only, not packed samples."""
        tensors = (options.pop("hidden_states"), options.pop("decoder_input"))

        def run(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **options)

        recomputed: Tensor = tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, *tensors)
        return recomputed


def make_mtp_spec(layer: ModuleSpec, *, provider: Any, number: int) -> MultiTokenPredictionBlockSubmodules:
    """The layers for multi-token prediction around a decoder layer.

    Args:
        layer: the decoder layer in each of them.
        provider: of norms and linear layers.
        number: of layers.
    """
    spec = replace(get_mtp_layer_spec_for_backend(layer, backend=provider), module=DetachedMtpLayer)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * number)
