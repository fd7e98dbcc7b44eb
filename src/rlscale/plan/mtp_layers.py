"""Layers for multi-token prediction of a Megatron-core trainer: parameters, activations and operations.

Each has three norms, a projection of embedding and hidden state, and a decoder layer like the last one. The last
pipeline stage has all of them and, if it is not the first, a copy of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture, Shape, count_elements
from rlscale.architectures.family import find_family
from rlscale.config import RunConfig, TrainBackendName
from rlscale.plan.activations import MicrobatchSpec
from rlscale.plan.megatron_activations import ParallelSizes, layer_input_bytes, layer_saved_bytes, norm_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayers:
    """The layers of a run.

    Example:
        MtpLayers.from_config(config).parameters(architecture)
    """

    number: int = 0
    is_trained: bool = False  # frozen layers are not computed

    @classmethod
    def from_config(cls, config: RunConfig) -> MtpLayers:
        """The layers of `megatron.mtp_num_layers`. Those of adapters are frozen."""
        number = int(config.megatron.core_args.get("mtp_num_layers") or 0)
        if config.train.backend != TrainBackendName.megatron or not number:
            return cls()
        return cls(number=number, is_trained=config.megatron.enable_mtp_training and not config.train.lora.rank)

    def parameters(self, a: Architecture) -> int:
        """Parameters of all layers, without the copy of the embedding."""
        return self.number * (count_elements(own_shapes(a)) + a.layer_parameters(a.num_layers - 1))

    def expert_parameters(self, a: Architecture) -> int:
        """Parameters of their experts."""
        has_experts = a.has_experts(a.num_layers - 1)
        return self.number * 3 * a.hidden_size * a.expert_size * a.num_experts * has_experts

    def copied_parameters(self, a: Architecture) -> int:
        """Parameters of the model that published checkpoints repeat in each layer."""
        family = find_family(a.model_type)
        return self.number * (len(family.mtp.copies) if family.mtp else 0) * a.vocab_size * a.hidden_size

    def step_flops(self, a: Architecture, *, tokens: float, context: float, logit_rows: float) -> float:
        """Floating-point operations of forward and backward pass. None of frozen layers."""
        if not self.is_trained:
            return 0.0
        last = a.num_layers - 1
        idle = (a.num_experts - a.experts_per_token) * 3 * a.hidden_size * a.expert_size * a.has_experts(last)
        per_token = 2 * (count_elements(own_shapes(a)) + a.layer_parameters(last) - idle)
        per_pair = 2 * a.num_heads * (a.query_width + a.value_width)
        # The output layer gets no gradient of these layers, only its input does.
        logits = 2 * logit_rows * 2 * a.vocab_size * a.hidden_size
        return self.number * (3 * tokens * (per_token + per_pair * context) + logits)

    def saved_bytes(self, a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes, *, is_full: bool) -> float:
        """Bytes that the layers save for their backward pass. None of frozen layers.

        Args:
            is_full: layers are recomputed, so that each saves its two inputs.
        """
        if not self.is_trained:
            return 0.0
        rows = work.logit_rows * work.dtype_bytes * a.hidden_size
        if is_full:
            return self.number * (2 * layer_input_bytes(a, work, parallel) + rows)
        # Norms of the embedding, of the hidden state and of the output; the two that are joined, and their projection.
        own = 3 * norm_bytes(a.hidden_size, work) + 3 * work.dtype_bytes * a.hidden_size
        layer = layer_saved_bytes(a, a.num_layers - 1, work, parallel)
        return self.number * (work.tokens * own / parallel.sequence + layer + rows)


NO_MTP = MtpLayers()


def own_shapes(a: Architecture) -> tuple[Shape, ...]:
    """Shapes of the weights of a layer outside of its decoder layer: three norms, and the projection."""
    return (*((a.hidden_size,),) * 3, (a.hidden_size, 2 * a.hidden_size))


def named_own_shapes(a: Architecture, number: int) -> Iterator[tuple[str, str, Shape]]:
    """Prefix, name and shape of the weights of `number` layers outside of their decoder layers, as published."""
    family = find_family(a.model_type)
    assert family.mtp is not None, "a rule refuses other families"
    for k in range(number):
        prefix = family.mtp.hf_layer.format(i=a.num_layers + k, k=k)
        for weight in family.mtp.own:
            is_matrix = weight.megatron.startswith("eh_proj")
            for name in weight.hf:
                yield prefix, name, (a.hidden_size, 2 * a.hidden_size) if is_matrix else (a.hidden_size,)
