"""Loading of a Hugging Face model and its sharding over the ranks with FSDP2.

    model on the meta device ─ adapters, heads, kernels ─ sharded ─ empty shards on the device ─ rows from the files

No rank holds a weight of which it keeps only a part.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.config import FLASH_ATTENTION, AttnImplementation, ComputeDtype, FsdpConfig, QkvFormat, TrainConfig
from rlscale.models.hf_weights import open_causal_lm
from rlscale.training.attention.context_attention import CONTEXT_ATTENTION
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.batch_invariant.forward import use_engine_kernels
from rlscale.training.cpu.fused_layers import use_fused_layers
from rlscale.training.cpu.onednn_linear import use_onednn
from rlscale.training.fsdp.shards import load_shards
from rlscale.training.fsdp.vision import use_vision_forward
from rlscale.training.modules.freeze import freeze_parameters
from rlscale.training.modules.logprob_head import output_layer, replace_with_logprob_head
from rlscale.training.modules.lora import add_adapters
from rlscale.training.modules.recompute import recompute_activations
from rlscale.training.modules.value_head import use_value_head

DTYPES = {ComputeDtype.bfloat16: torch.bfloat16, ComputeDtype.float32: torch.float32}


def load_sharded(
    path: str,
    *,
    mesh: DeviceMesh,
    fsdp: FsdpConfig,
    train: TrainConfig,
    is_trained: bool,
    has_value_head: bool = False,
) -> PreTrainedModel:
    """Builds a model on every rank and loads this rank's shard of its weights, in float32; a collective of all ranks.

    Every decoder layer is an FSDP unit; embeddings, final norm and output layer are in the root unit. Where there is
    nothing to shard or to cast (`stays_whole`) the model is not wrapped; checkpoints are the same.

    Args:
        path: Hugging Face folder or hub id.
        mesh: one axis with all ranks.
        fsdp: attention kernel and gradient checkpointing.
        train: dtype of the computation (weights and gradient reductions are always float32), trained parameters, and
            tokens whose logits exist at a time.
        is_trained: False for a model that only scores.
        has_value_head: replace the output layer by a new value head.
    """
    is_padded = train.qkv_format == QkvFormat.bshd
    kernel = attention_kernel(fsdp, device_type=mesh.device_type, dtype=train.dtype, is_padded=is_padded)
    model, weights = open_causal_lm(path, attn_implementation=kernel)
    if has_value_head:
        use_value_head(model)
    model.requires_grad_(is_trained)
    if is_trained:
        # A critic next to adapters trains all of its weights.
        if train.lora.rank and not has_value_head:
            add_adapters(model, train.lora, seed=train.seed)
        else:
            freeze_parameters(model, train)
        if has_value_head:
            # It starts at 0: frozen, it would give every value 0 and the layers below no gradient.
            output_layer(model).requires_grad_(True)  # type: ignore[union-attr]  # the value head
    _disable_dropout(model)
    # Before sharding: these change classes and forward methods, which FSDP then wraps.
    if mesh.device_type == "cpu":
        use_onednn(model)
        if not train.true_on_policy_mode:
            use_fused_layers(model, decoder_layers(model))
    use_vision_forward(model)
    if is_trained and fsdp.gradient_checkpointing:
        recompute_activations(model)
    model.train(is_trained)
    if not has_value_head:
        if train.true_on_policy_mode:
            use_engine_kernels(model, decoder_layers(model))
        else:
            replace_with_logprob_head(model, chunk_tokens=train.log_probs_chunk_size)
    if not stays_whole(mesh, train):
        _shard(model, mesh=mesh, train=train)
    if weights is None:
        _own_memory(model)
    else:
        load_shards(model, weights, mesh=mesh)
    return model


def _shard(model: PreTrainedModel, *, mesh: DeviceMesh, train: TrainConfig) -> None:
    # Parameters and their gradients stay float32; only the gathered copies have the dtype of the computation.
    policy = MixedPrecisionPolicy()
    if train.dtype != ComputeDtype.float32:
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[train.dtype], reduce_dtype=torch.float32)
    # Layers before the root: the root unit takes the parameters that are left.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def attention_kernel(fsdp: FsdpConfig, *, device_type: str, dtype: ComputeDtype, is_padded: bool = False) -> str:
    """Name of the attention in transformers: ours for packed samples, unless flash attention supports them itself."""
    choice = fsdp.attn_implementation
    # The packages of flash attention have kernels for GPUs and 16 bits only.
    has_kernel = device_type == "cuda" and dtype != ComputeDtype.float32
    if choice in FLASH_ATTENTION and not has_kernel:
        choice = AttnImplementation.sdpa
    if is_padded:
        return str(choice)
    if fsdp.context_parallel_size > 1:
        assert choice != AttnImplementation.eager, "a config rule excludes eager attention with context parallelism"
        return CONTEXT_ATTENTION
    return PACKED_ATTENTION if choice == AttnImplementation.sdpa else str(choice)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Decoder layers: the modules that transformers lists as not to be split."""
    names = set(model._no_split_modules or ())
    # Sharding replaces the class of a layer by a subclass with another name.
    layers = [module for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}]
    assert layers, f"{type(model).__name__} names no decoder layers"
    return layers


def has_shapes_of(model: nn.Module, other: nn.Module) -> bool:
    """True where both models have the same parameters, by name and shape."""
    shapes, others = ({name: p.shape for name, p in each.named_parameters()} for each in (model, other))
    return shapes == others


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies the weights of one model into another of the same shapes; each rank copies its shard, no communication."""
    new, old = ((*each.parameters(), *each.buffers()) for each in (source, target))
    for destination, tensor in zip(old, new, strict=True):
        destination.copy_(tensor)


@torch.no_grad()
def _own_memory(model: nn.Module) -> None:
    """Copies weights that transformers loaded out of the mapped files, into storages that can be freed."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # FSDP has copied its shard
            parameter.data = parameter.data.clone()


def stays_whole(mesh: DeviceMesh, train: TrainConfig) -> bool:
    """True where a model is not wrapped: with one rank on a CPU and no cast, FSDP's hooks only cost time."""
    return mesh.device_type == "cpu" and mesh.size() == 1 and train.dtype == ComputeDtype.float32


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters after a forward pass without a backward pass.

    FSDP keeps the root unit gathered: without this the next forward pass would use its weights from before the step.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def sync_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Makes the next backward pass reduce gradients over all ranks (last micro-batch), or only accumulate them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)


def _disable_dropout(model: nn.Module) -> None:
    """Disables dropout: old and new logprobs must come from the same function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.__dict__["attention_dropout"] = 0.0
