"""Forward pass of a Hugging Face model that is bitwise equal to that of the embedded engine.

Every operator is called with the batch shapes of the engine. Attention takes its gradient from the plain operator,
whose values differ in the last bits. Weights stay in the model and its shards.

Shape legend: T packed tokens, R trainable tokens, V vocabulary, H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from rlscale.errors import ConfigError, Problem
from rlscale.models.decoder_config import DecoderConfig, rotary_tables
from rlscale.models.decoder_ops import attend_cached, attend_prompts, gated, rms_norm, split_heads
from rlscale.models.packed_linear import PackedLinear
from rlscale.training.attention.packed import PackedLayout, packed_attention
from rlscale.training.batch_invariant.engine_rows import Blocks, EngineRows

BLOCK = 128
"""The engine pads the vocabulary to a multiple of this before it samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Inputs that all layers of a forward pass share."""

    rows: EngineRows
    packing: PackedLayout
    cos: Tensor  # [T, 1, D]
    sin: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """A model, its decoder layers and its architecture."""

    model: PreTrainedModel
    layers: Sequence[nn.Module]
    config: DecoderConfig


def use_engine_kernels(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Replaces the forward pass of a model, in place; the new one needs `engine_rows`.

    Args:
        model: not sharded yet.
        layers: its decoder layers, which FSDP gathers one by one.

    Raises:
        ConfigError: the embedded engine, or this forward pass, does not support the model.
    """
    try:
        config = DecoderConfig.from_config_json(model.config.to_dict())
    except ValueError as error:
        raise _refusal(model.config.model_type, str(error)) from error
    if config.routing is not None:
        raise _refusal(model.config.model_type, "in models with experts each expert computes in other batch shapes")
    for layer in layers:
        # On the instance: FSDP changes the class, and calls this method after it has gathered the weights.
        layer.forward = partial(_layer_forward, layer, config)
    model.forward = partial(_forward, _Parts(model=model, layers=layers, config=config))


def computes_as_engine(model: nn.Module) -> bool:
    """True where `use_engine_kernels` was applied to the model."""
    forward = model.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _refusal(model_type: str, why: str) -> ConfigError:
    return ConfigError(
        [Problem(path="train.true_on_policy_mode", rule=f"be false with a {model_type} model", value="true", fix=why)]
    )


def engine_logprobs(logits_RV: Tensor, *, targets_R: Tensor, temperature: float) -> Tensor:
    """Logprobs by the same operations as in the engine. [R] float32, without a gradient"""
    num_rows, vocab_size = logits_RV.shape
    scaled = logits_RV.new_full((num_rows, -(-vocab_size // BLOCK) * BLOCK), -torch.inf, dtype=torch.float32)
    scaled[:, :vocab_size] = logits_RV.detach()
    if temperature != 1.0:
        scaled /= torch.full((num_rows, 1), temperature, device=scaled.device)
    return scaled.softmax(dim=-1).gather(1, targets_R[:, None]).squeeze(1).double().log().float()


def with_values(source: Tensor, values: Tensor) -> Tensor:
    """A tensor with the given values and the gradient of `source`."""
    result: Tensor = _WithValues.apply(source, values)  # type: ignore[no-untyped-call]
    return result


def _forward(
    parts: _Parts,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    logits_to_keep: Tensor,
    packing: PackedLayout,
    engine_rows: EngineRows,
    **_: Any,
) -> CausalLMOutput:
    model, config = parts.model, parts.config
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    x = F.embedding(input_ids.squeeze(0), embedding)
    positions = position_ids.squeeze(0)
    tables = rotary_tables(config, engine_rows.num_positions)
    cos, sin = (table.to(x.device, x.dtype)[positions].unsqueeze(1) for table in tables)
    context = _Pass(rows=engine_rows, packing=packing, cos=cos, sin=sin)
    for layer in parts.layers:
        x = layer(x, context)
    x = rms_norm(x[logits_to_keep], _weight(model.base_model, "norm"), eps=config.norm_eps)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits = _product(x, [head], engine_rows.head)
    # A plain tensor, not a view: FSDP warns about views of its outputs.
    return CausalLMOutput(logits=torch.ops.aten._unsafe_view(logits, (1, *logits.shape)))


def _layer_forward(layer: nn.Module, config: DecoderConfig, x: Tensor, context: _Pass) -> Tensor:
    blocks = context.rows.layers
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _weight(attention, "q_norm"), _weight(attention, "k_norm")
    h = rms_norm(x, _weight(layer, "input_layernorm"), eps=config.norm_eps)
    qkv = _product(h, [attention.get_submodule(f"{name}_proj") for name in "qkv"], blocks)
    q, k, v = split_heads(qkv, config, norms=norms, cos=context.cos, sin=context.sin)
    mixed = _attend(q, k, v, context)
    x = x + _product(mixed, [attention.get_submodule("o_proj")], blocks)
    h = rms_norm(x, _weight(layer, "post_attention_layernorm"), eps=config.norm_eps)
    inner = gated(_product(h, [mlp.get_submodule("gate_proj"), mlp.get_submodule("up_proj")], blocks))
    return x + _product(inner, [mlp.get_submodule("down_proj")], blocks)


def _weight(module: nn.Module, name: str) -> Tensor:
    weight = module.get_submodule(name).weight
    assert isinstance(weight, Tensor), f"{name} has a weight"
    return weight


def _attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: _Pass) -> Tensor:
    """Attention of all rows in the batch shapes of the engine, with the gradient of packed attention. [T, H D]"""
    exact = _attend_as_engine(q_THD.detach(), k_TKD.detach(), v_TKD.detach(), context.rows)
    if not torch.is_grad_enabled():
        return exact.flatten(1)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD))
    plain, _ = packed_attention(nn.Module(), queries, keys, values, None, packing=context.packing)
    return with_values(plain.squeeze(0), exact).flatten(1)


def _attend_as_engine(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rows: EngineRows) -> Tensor:
    num_rows, num_heads, width = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    # Row T, of zeros, stands for padding: reads give zeros, and what is written there is dropped.
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (q_THD, k_TKD, v_TKD))
    out = torch.zeros_like(q)
    for prompts in rows.prompts:
        queries, keys, values = (x[prompts.rows].transpose(1, 2) for x in (q, k, v))
        out[prompts.rows.flatten()] = attend_prompts(queries, keys, values).transpose(1, 2).flatten(0, 1)
    for decode in rows.decodes:
        num_slots = len(decode.rows)
        pairs = num_slots * num_kv_heads
        # Cached positions count from the first row of the sample; those after the token itself are hidden.
        cached = decode.starts[:, None] + torch.arange(decode.length, device=q.device)
        hidden = cached > decode.rows[:, None]
        cached = cached.masked_fill(hidden, num_rows)
        queries = q[decode.rows].reshape(pairs, num_heads // num_kv_heads, width)
        keys, values = (x[cached].transpose(1, 2).reshape(pairs, decode.length, width) for x in (k, v))
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)
        mask = mask.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1)
        out[decode.rows] = attend_cached(queries, keys, values, mask).view(num_slots, num_heads, width)
    return out[:num_rows]


def _product(x: Tensor, layers: Sequence[nn.Module], blocks: Sequence[Blocks]) -> Tensor:
    """Product with the weights of linear layers of the same input, side by side."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    out: Tensor = _BlockProduct.apply(x, blocks, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return out


class _BlockProduct(torch.autograd.Function):
    """x @ W.T + b in blocks of rows, with the engine's kernel. The backward pass is one plain product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Sequence[Blocks], num_weights: int, *parameters: Tensor) -> Tensor:
        # The parameters themselves: FSDP frees their memory until the backward pass; a concatenation would stay.
        ctx.save_for_backward(x, *parameters)
        ctx.num_weights = num_weights
        weight, bias = _joined(parameters, num_weights)
        product = PackedLinear(weight, bias)
        out = x.new_empty(x.shape[0], weight.shape[0])
        for block in blocks:
            for rows in torch.split(block.rows, block.size):
                part = F.pad(x[rows], (0, 0, 0, block.size - len(rows)))
                out[rows] = product(part)[: len(rows)]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, *parameters = ctx.saved_tensors
        weight, _ = _joined(parameters, ctx.num_weights)
        sizes = [part.shape[0] for part in parameters[: ctx.num_weights]]
        needed = ctx.needs_input_grad
        of_x = grad @ weight if needed[0] else None
        of_weights: Sequence[Tensor | None] = [None] * ctx.num_weights
        of_biases: Sequence[Tensor | None] = [None] * (len(parameters) - ctx.num_weights)
        if any(needed[3 : 3 + ctx.num_weights]):
            of_weights = torch.split(grad.t() @ x, sizes)
        if any(needed[3 + ctx.num_weights :]):
            of_biases = torch.split(grad.sum(dim=0), sizes)
        return of_x, None, None, *of_weights, *of_biases


def _joined(parameters: Sequence[Tensor], num_weights: int) -> tuple[Tensor, Tensor | None]:
    weights, biases = [p.detach() for p in parameters[:num_weights]], [p.detach() for p in parameters[num_weights:]]
    weight = weights[0].contiguous() if num_weights == 1 else torch.cat(weights)
    return weight, torch.cat(biases) if biases else None


class _WithValues(torch.autograd.Function):
    """Returns `values`; the gradient goes to the first input unchanged."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
