"""The model of a Megatron-core trainer: this rank's part of the layers, ending in hidden states instead of logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlscale.architectures.family import find_family
from rlscale.architectures.vision import rotary_rows
from rlscale.config import ComputeDtype, MegatronConfig, ModelConfig
from rlscale.config.groups.model import MegatronToHf
from rlscale.training.loss.user_hooks import NO_CUSTOM
from rlscale.training.megatron.hooks import ChunkBuilder
from rlscale.training.megatron.model.adapted_layers import AdapterSettings
from rlscale.training.megatron.model.attention import PackedSamples
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.layer_specs import block_spec, mtp_spec
from rlscale.training.megatron.model.layers import mark_expert_biases
from rlscale.training.megatron.model.mla import set_positions
from rlscale.training.megatron.model.rotary import ImageRotaryEmbedding, ModelRotaryEmbedding, inverse_frequencies
from rlscale.training.megatron.model.transformer_config import MegatronArchitecture, load_architecture
from rlscale.training.megatron.model.vision import build_tower, image_features
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.modules.value_head import ValueHead, squeeze_values

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?P<before>.+\.experts\.)local_experts\.(?P<j>\d+)\.(?P<after>.+)")
_GROUPED_EXPERT = re.compile(r"(?P<before>.+\.experts\.)(?P<after>linear_fc[12]\.(?:weight|bias))(?P<j>\d+)")

EXPERT_BIAS = ".router.expert_bias"
"""Suffix of the buffer that is added to router scores when experts are chosen."""

MTP = "mtp."
"""Prefix of the parameters of the layers for multi-token prediction."""

VALUE_HEAD = "value_head."
"""Prefix of the parameters of a value head."""

DTYPES = {ComputeDtype.bfloat16: torch.bfloat16, ComputeDtype.float32: torch.float32}


class MegatronDecoder(GPTModel):  # type: ignore[misc]  # Megatron-core has no types
    """A pipeline chunk. The last one returns hidden states, from which the loss computes logprobs without logits."""

    trains_mtp = False  # whether forward passes with gradient compute the layers for multi-token prediction

    def _postprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """The normalised hidden states of all tokens, from the last chunk: [B, L, H], or [1, T, H] if packed.

        Every tensor-parallel rank gets the whole states and must return their whole gradient, as
        `logprobs_from_hidden` does with `VocabShard`. Other chunks return the input of the next one. With
        `trains_mtp` a pass with gradient adds the rows of each layer for multi-token prediction: [(1 + D) B, L, H].
        """
        if not self.post_process:
            return hidden_states
        if not (self.trains_mtp and torch.is_grad_enabled()):
            return self._whole_rows(hidden_states)
        names = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "packed_seq_params")
        states: Tensor = self.mtp(
            hidden_states=hidden_states, embedding=self.embedding, **{name: options[name] for name in names}
        )
        # The block concatenates the states of the model and of each layer along the positions.
        return torch.cat([self._whole_rows(each) for each in states.chunk(1 + self.config.mtp_num_layers)])

    def _whole_rows(self, hidden_states: Tensor) -> Tensor:
        """Hidden states of a rank, [L, B, H], as rows of all positions. [B, L, H]"""
        if self.config.sequence_parallel:
            # Each rank's gradient is whole already, so the backward pass must split it instead of summing it.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.transpose(0, 1)

    @property
    def head_weight(self) -> nn.Parameter:
        """The rank's rows of the last chunk's output layer; with tied weights, of the embedding."""
        assert self.post_process, "only the last pipeline chunk has an output layer"
        if self.share_embeddings_and_output_weights:
            weight: nn.Parameter = self.shared_embedding_or_output_weight()
            return weight
        own: nn.Parameter = self.output_layer.weight
        return own


class VisionDecoder(MegatronDecoder):
    """A pipeline chunk of a model with images. The first one has the vision tower.

    Args:
        vision_config: of the tower.
        options: as `GPTModel`.
    """

    def __init__(self, *, config: TransformerConfig, vision_config: PreTrainedConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        if self.pre_process:
            self.vision_tower = build_tower(vision_config, config=config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSamples,
        **options: Any,
    ) -> Tensor:
        """As `MegatronDecoder`, of packed samples.

        Args:
            input_ids: [1, T]
            position_ids: of the text, and of frames, rows and columns, [4, 1, P], P positions on all context-parallel
                ranks; without images they are not read.
            attention_mask: None.
            packed_seq_params: on the first stage with the images and the rows of this rank that get features.
            options: as `GPTModel.forward`.
        """
        # Megatron-core takes the angles of this rank from those of all context-parallel ranks.
        rows = position_ids[1:] if position_ids.dim() == 3 else packed_seq_params.positions.expand(3, 1, -1)
        images = packed_seq_params.images
        if self.pre_process and images is not None:
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            features, deepstack = image_features(self.vision_tower, images)
            options["decoder_input"] = embedded.index_copy(0, images.rows, features.to(embedded.dtype).unsqueeze(1))
            options["extra_block_kwargs"] = {"context": deepstack}
            num_layers = len(self.decoder.layers)
            assert deepstack is None or len(deepstack) <= num_layers, "a config rule keeps these layers here"
        hidden: Tensor = super().forward(
            input_ids, rows, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return hidden


class MegatronValueDecoder(MegatronDecoder):
    """A pipeline chunk of a critic. The last one has a value head instead of the output layer."""

    def __init__(self, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        if self.post_process:
            self.output_layer = None
            # Replicated: all tensor-parallel ranks compute the same gradient.
            head = ValueHead(config.hidden_size)
            self.value_head = head.to(torch.cuda.current_device(), config.params_dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # GPTModel's own method adds entries for the output layer, which a critic does not have.
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        if self.pre_process:
            # Other parallel sizes pad the vocabulary to another number of rows.
            state[f"{prefix}embedding.word_embeddings.weight"].allow_shape_mismatch = True
        return state

    def values(self, hidden: Tensor) -> Tensor:
        """Values of hidden states: [R, H] -> [R], in float32."""
        return squeeze_values(self.value_head(hidden))


class VisionValueDecoder(VisionDecoder, MegatronValueDecoder):
    """A pipeline chunk of a critic that reads images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """The pipeline chunks of this rank: one, or several with an interleaved pipeline."""

    chunks: list[MegatronDecoder]
    architecture: MegatronArchitecture
    uses_bridge: bool = False  # mbridge converts its weights
    adapters: AdapterSettings | None = None  # None: all weights are trained

    @property
    def config(self) -> TransformerConfig:
        """Megatron-core's config; the same object in every chunk."""
        return self.architecture.transformer

    @property
    def first_token(self) -> int:
        """Token id of this rank's first row of embedding and output layer."""
        rows = self.architecture.padded_vocab_size // int(parallel_state.get_tensor_model_parallel_world_size())
        return rows * int(parallel_state.get_tensor_model_parallel_rank())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rank's parameters under names that are the same in every parallel layout.

        Layers and experts are numbered over the whole model, and each expert has its own name. A tied output layer of
        the last stage, which is a copy of the embedding on the first, is named `output_layer.weight`.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                yield self._global_name(chunk, name), parameter

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The rank's modules under names like those of the parameters."""
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                yield self._global_name(chunk, name), module

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and the only buffer that belongs to the weights: the bias with which experts are chosen.

        Each stage has the bias of its layers, whole and in float32.
        """
        yield from self.named_parameters()
        for chunk in self.chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith(EXPERT_BIAS):
                    yield self._global_name(chunk, name), buffer

    def _global_name(self, chunk: MegatronDecoder, name: str) -> str:
        # Expert parallelism gives each rank a contiguous range of experts.
        num_ranks = self.config.expert_model_parallel_size
        first = (self.config.num_moe_experts or 0) // num_ranks * parallel_state.get_expert_model_parallel_rank()
        return _global_name(name, layers=[layer.layer_number - 1 for layer in chunk.decoder.layers], first_expert=first)


def build_model(
    path: str,
    *,
    model: ModelConfig,
    megatron: MegatronConfig,
    dtype: torch.dtype,
    has_value_head: bool = False,
    custom: Mapping[str, Any] = NO_CUSTOM,
) -> MegatronModel:
    """Builds this rank's part of a model with uninitialised weights, for `load_hf` or a checkpoint to fill.

    Megatron-core's parallel state must be initialised and its random generators seeded
    (`model_parallel_cuda_manual_seed`); `build_parallel_dims` does both.

    Args:
        path: Hugging Face folder or hub id; only its config is read.
        model: keys that must agree with that config, and the padding of the vocabulary.
        megatron: parallel sizes, and further fields of Megatron-core.
        dtype: of parameters and activations.
        has_value_head: replaces the output layer; the embedding is then not tied.
        custom: the config's node `custom`, for the function of `model.custom_model_provider_path`.

    Raises:
        ConfigError: with every key that contradicts the config, or every feature that Megatron-core does not support.
    """
    with megatron_device():
        architecture = load_architecture(path, model=model, megatron=megatron, dtype=dtype)
        if has_value_head:
            architecture = architecture.untied()
        assert get_cuda_rng_tracker().get_states(), "the random generators of Megatron-core must be seeded first"
        virtual = architecture.transformer.virtual_pipeline_model_parallel_size
        stages = [None] if virtual is None else list(range(virtual))
        kind: type[MegatronDecoder] = MegatronValueDecoder if has_value_head else MegatronDecoder
        if architecture.vision_config is not None:
            kind = VisionValueDecoder if has_value_head else VisionDecoder
        builders = [_make_builder(kind, architecture, megatron=megatron, vp_stage=stage) for stage in stages]
        chunks = [each.build_with(model.custom_model_provider_path, custom) for each in builders]
        for chunk in chunks:
            chunk.trains_mtp = chunk.mtp_process and megatron.enable_mtp_training
            _set_rotary_embedding(chunk, architecture)
            # Megatron-core creates the gate of a shared expert on the host.
            chunk.to(torch.cuda.current_device())
            mark_expert_biases(chunk)
    uses_bridge = model.megatron_to_hf_mode == MegatronToHf.bridge
    return MegatronModel(chunks=chunks, architecture=architecture, uses_bridge=uses_bridge)


def configure_pipeline(model: MegatronModel, dims: ParallelDims) -> MegatronModel:
    """Sets how the stages of a model exchange messages. Returns the same model."""
    if dims.num_virtual_stages > 1:
        # Megatron-core's interleaved schedule does not send lengths; micro-batches are padded to one length.
        model.config.variable_seq_lengths = False
    return model


def _make_builder(
    kind: type[MegatronDecoder], architecture: MegatronArchitecture, *, megatron: MegatronConfig, vp_stage: int | None
) -> ChunkBuilder:
    config, where = architecture.transformer, {"ignore_virtual": False, "vp_stage": vp_stage}
    family, vision_config = find_family(architecture.family), architecture.vision_config
    return ChunkBuilder(
        kind,
        ({} if vision_config is None else {"vision_config": vision_config})
        | {
            "config": config,
            "transformer_layer_spec": block_spec(config, family=family, vp_stage=vp_stage),
            "mtp_block_spec": mtp_spec(config, family=family, vp_stage=vp_stage),
            "vocab_size": architecture.padded_vocab_size,
            "max_sequence_length": megatron.max_position_embeddings or architecture.hf_config.max_position_embeddings,
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "share_embeddings_and_output_weights": architecture.is_tied,
            "position_embedding_type": "rope" if vision_config is None else "mrope",
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
            "vp_stage": vp_stage,
        },
    )


def _set_rotary_embedding(chunk: MegatronDecoder, architecture: MegatronArchitecture) -> None:
    """Replaces the rotary embedding of a chunk by one with the frequencies of transformers."""
    config = architecture.transformer
    if config.multi_latent_attention:
        mtp = [layer.transformer_layer for layer in chunk.mtp.layers] if chunk.mtp_process else []
        for layer in [*chunk.decoder.layers, *mtp]:
            set_positions(layer.self_attention, architecture.hf_config)
        return
    frequencies = inverse_frequencies(architecture.hf_config, head_dim=config.kv_channels)
    vision = find_family(architecture.family).vision
    if vision is not None:
        rows = rotary_rows(config.mrope_section, interleaved=vision.interleaved_rotary)
        chunk.rotary_pos_emb = ImageRotaryEmbedding(frequencies, rows)
        return
    chunk.rotary_pos_emb = ModelRotaryEmbedding(
        frequencies, is_interleaved=config.rotary_interleaved, cp_group=chunk.pg_collection.cp
    )


def _global_name(name: str, *, layers: list[int], first_expert: int) -> str:
    """Replaces the indices of layer and expert in a chunk's parameter name by those in the whole model."""
    layer = _LAYER.match(name)
    if layer is not None:
        name = f"decoder.layers.{layers[int(layer[1])]}.{layer[2]}"
    elif not name.startswith(MTP):  # one stage has all of these layers
        return name
    # SequentialMLP names experts as submodules, Transformer Engine's grouped layers by a suffix of the weight.
    expert = _EXPERT.match(name) or _GROUPED_EXPERT.match(name)
    if expert is None:
        return name
    return f"{expert['before']}local_experts.{first_expert + int(expert['j'])}.{expert['after']}"
