"""The model of a Megatron-core trainer: this rank's part of the layers, with hidden states where others give logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlscale.config import ComputeDtype, MegatronConfig, ModelConfig
from rlscale.config.groups.model import MegatronToHf
from rlscale.training.loss.user_hooks import NO_CUSTOM
from rlscale.training.megatron.cpu_patches import megatron_device
from rlscale.training.megatron.hooks import ChunkBuilder
from rlscale.training.megatron.model.layer_specs import block_spec
from rlscale.training.megatron.model.mla import set_positions
from rlscale.training.megatron.model.rotary import ModelRotaryEmbedding, inverse_frequencies
from rlscale.training.megatron.model.transformer_config import Architecture, architecture_of
from rlscale.training.megatron.parallel_dims import MegatronGrid
from rlscale.training.modules.value_head import ValueHead, squeeze_values

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?P<before>.+\.experts\.)local_experts\.(?P<j>\d+)\.(?P<after>.+)")
_GROUPED_EXPERT = re.compile(r"(?P<before>.+\.experts\.)(?P<after>linear_fc[12]\.weight)(?P<j>\d+)")

EXPERT_BIAS = ".router.expert_bias"
"""How the name of the buffer ends that is added to scores where experts are chosen."""

VALUE_HEAD = "value_head."
"""What names of the parameters of a value head begin with."""

DTYPES = {ComputeDtype.bfloat16: torch.bfloat16, ComputeDtype.float32: torch.float32}

POST_NORM_FAMILIES = frozenset({"glm4"})
"""Families that normalise what attention and MLP give, too."""


class Decoder(GPTModel):  # type: ignore[misc]  # Megatron-core has no types
    """A pipeline chunk. The last one returns hidden states, of which the loss makes logprobs without logits."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Of the last chunk the normalised hidden states of all its tokens, [B, L, H] or packed [1, T, H].

        They are whole on every tensor-parallel rank, and each must give their whole gradient, as `linear_logprobs` does
        with `VocabShard`. Other chunks return what the next one takes.
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.transpose(0, 1)

    @property
    def head_weight(self) -> nn.Parameter:
        """This rank's rows of the output layer, of the last chunk; with tied weights those of the embedding."""
        assert self.post_process, "only the last pipeline chunk has an output layer"
        if self.share_embeddings_and_output_weights:
            weight: nn.Parameter = self.shared_embedding_or_output_weight()
            return weight
        own: nn.Parameter = self.output_layer.weight
        return own


class ValueDecoder(Decoder):
    """A pipeline chunk of a critic. The last one has a value head in the place of the output layer."""

    def __init__(self, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        if self.post_process:
            self.output_layer = None
            # Whole on every tensor-parallel rank, which all give it the same gradient.
            head = ValueHead(config.hidden_size)
            self.value_head = head.to(torch.cuda.current_device(), config.params_dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # What a language model adds to this is about the output layer.
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        if self.pre_process:
            # The number of rows that fill up the ranks' parts is another on other ranks.
            state[f"{prefix}embedding.word_embeddings.weight"].allow_shape_mismatch = True
        return state

    def values(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, H] to values [R], in float32."""
        return squeeze_values(self.value_head(hidden))


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """The pipeline chunks of this rank: one, or several with an interleaved pipeline."""

    chunks: list[Decoder]
    architecture: Architecture
    by_bridge: bool = False  # mbridge converts its weights

    @property
    def config(self) -> TransformerConfig:
        """Megatron-core's; the same object in every chunk."""
        return self.architecture.transformer

    @property
    def first_token(self) -> int:
        """Token id of this rank's first row of embedding and output layer."""
        rows = self.architecture.padded_vocab_size // int(parallel_state.get_tensor_model_parallel_world_size())
        return rows * int(parallel_state.get_tensor_model_parallel_rank())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under names that are the same in every parallel layout.

        Layers and experts are counted over the whole model, and experts are named one by one. A tied output layer of
        the last stage, which is a copy of the embedding on the first, comes as `output_layer.weight`.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                yield self._whole_name(chunk, name), parameter

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters, and what else makes up the model without being trained: the bias by which experts are chosen.

        On every stage with its layers, whole and in float32.
        """
        yield from self.named_parameters()
        for chunk in self.chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith(EXPERT_BIAS):
                    yield self._whole_name(chunk, name), buffer

    def _whole_name(self, chunk: Decoder, name: str) -> str:
        parts = self.config.expert_model_parallel_size
        first = (self.config.num_moe_experts or 0) // parts * parallel_state.get_expert_model_parallel_rank()
        return _whole_name(name, layers=[layer.layer_number - 1 for layer in chunk.decoder.layers], first_expert=first)


def build_model(
    path: str,
    *,
    model: ModelConfig,
    megatron: MegatronConfig,
    dtype: torch.dtype,
    has_value_head: bool = False,
    custom: Mapping[str, Any] = NO_CUSTOM,
) -> MegatronModel:
    """This rank's part of a model, its weights left as memory comes: `load_hf` or a checkpoint fills them.

    Megatron-core's parallel state must be made, and its random generators seeded (`model_parallel_cuda_manual_seed`).

    Args:
        path: Hugging Face folder or hub id; only its config is read.
        model: keys that must agree with that config, and the padding of the vocabulary.
        megatron: parallel sizes, and further fields of Megatron-core.
        dtype: of parameters and activations.
        has_value_head: in the place of the output layer; the embedding is then tied to nothing.
        custom: the config's node `custom`, for the function of `model.custom_model_provider_path`.

    Raises:
        ConfigError: with every key that contradicts the config, or what of it Megatron-core does not have.
    """
    with megatron_device():
        architecture = architecture_of(path, model=model, megatron=megatron, dtype=dtype)
        if has_value_head:
            architecture = replace(architecture, is_tied=False)
        assert get_cuda_rng_tracker().get_states(), "the random generators of Megatron-core are seeded first"
        virtual = architecture.transformer.virtual_pipeline_model_parallel_size
        stages = [None] if virtual is None else list(range(virtual))
        kind = ValueDecoder if has_value_head else Decoder
        builders = [_builder(kind, architecture, megatron=megatron, vp_stage=stage) for stage in stages]
        chunks = [_finished(each.provided(model.custom_model_provider_path, custom), architecture) for each in builders]
    by_bridge = model.megatron_to_hf_mode == MegatronToHf.bridge
    return MegatronModel(chunks=chunks, architecture=architecture, by_bridge=by_bridge)


def for_grid(model: MegatronModel, grid: MegatronGrid) -> MegatronModel:
    """The same model, told how its stages send messages."""
    if grid.num_virtual_stages > 1:
        # Its messages cannot tell of lengths; micro-batches are filled up to one.
        model.config.variable_seq_lengths = False
    return model


def _builder(
    kind: type[Decoder], architecture: Architecture, *, megatron: MegatronConfig, vp_stage: int | None
) -> ChunkBuilder:
    config, where = architecture.transformer, {"ignore_virtual": False, "vp_stage": vp_stage}
    has_post_norms = architecture.family in POST_NORM_FAMILIES
    return ChunkBuilder(
        kind,
        {
            "config": config,
            "transformer_layer_spec": block_spec(config, has_post_norms=has_post_norms, vp_stage=vp_stage),
            "vocab_size": architecture.padded_vocab_size,
            "max_sequence_length": megatron.max_position_embeddings or architecture.hf_config.max_position_embeddings,
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "share_embeddings_and_output_weights": architecture.is_tied,
            "position_embedding_type": "rope",
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
            "vp_stage": vp_stage,
        },
    )


def _finished(chunk: Decoder, architecture: Architecture) -> Decoder:
    """The same chunk, with the positions that transformers has."""
    config = architecture.transformer
    if config.multi_latent_attention:
        for layer in chunk.decoder.layers:
            set_positions(layer.self_attention, architecture.hf_config)
        return chunk
    frequencies = inverse_frequencies(architecture.hf_config, head_dim=config.kv_channels)
    chunk.rotary_pos_emb = ModelRotaryEmbedding(
        frequencies, is_interleaved=config.rotary_interleaved, cp_group=chunk.pg_collection.cp
    )
    return chunk


def _whole_name(name: str, *, layers: list[int], first_expert: int) -> str:
    """A name of a chunk's parameter with the layer and the expert that it has in the whole model."""
    layer = _LAYER.match(name)
    if layer is None:
        return name
    name = f"decoder.layers.{layers[int(layer[1])]}.{layer[2]}"
    expert = _EXPERT.match(name) or _GROUPED_EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert['before']}local_experts.{first_expert + int(expert['j'])}.{expert['after']}"
