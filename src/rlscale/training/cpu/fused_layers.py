"""Fused decoder layers for a CPU: in small models the launch of an operator costs more than its work.

A layer is one autograd function before attention and one after it, with explicit backward passes: projections of the
same input are one product, and norms, rotation and gate need one or two passes over memory instead of five to ten. The
formulas are those of transformers, in float32; the last bits differ.

Shape legend: T packed tokens, W hidden width, H query heads, K key/value heads, J = H + 2 K, D head width, I width of
the gated MLP.
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

from rlscale.architectures.family import find_family
from rlscale.training.attention.packed import PACKED_ATTENTION, PackedLayout, attend_joined
from rlscale.training.cpu.onednn_linear import OneDnnLinear, product, weight_gradient

_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """Sizes and options of the attention of a layer."""

    num: int
    num_kv: int
    width: int
    eps: float
    scale: float
    window: int | None


def use_fused_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> int:
    """Replaces the forward methods of suitable decoder layers, in place; returns the number of layers.

    A layer with a bias, adapters, experts or an activation other than SiLU keeps its own method. So does a fused one
    for other inputs than packed float32 rows.

    Args:
        model: not sharded yet, on a CPU, after `use_onednn`.
        layers: its decoder layers.
    """
    config = model.config
    if not find_family(config.model_type).fused_cpu or config._attn_implementation != PACKED_ATTENTION:
        return 0
    if getattr(config, "hidden_act", None) != "silu":
        return 0
    suitable = [layer for layer in layers if _is_plain(layer)]
    for layer in suitable:
        attention = layer.get_submodule("self_attn")
        heads = _Heads(
            num=config.num_attention_heads,
            num_kv=config.num_key_value_heads,
            width=int(attention.head_dim),  # type: ignore[arg-type]
            eps=float(config.rms_norm_eps),
            scale=float(attention.scaling),  # type: ignore[arg-type]
            window=getattr(attention, "sliding_window", None),
        )
        # On the instance: FSDP changes the class, and calls this method after it has gathered the weights.
        layer.forward = partial(_layer, layer, heads)
    return len(suitable)


def _is_plain(layer: nn.Module) -> bool:
    parts = dict(layer.named_modules())
    linear = all(type(parts.get(name)) is OneDnnLinear for name in (*_LINEAR, *_GATED))
    known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "mlp.act_fn", "", *_LINEAR, *_GATED}
    others = parts.keys() - known
    return linear and others in (set(), {"self_attn.q_norm", "self_attn.k_norm"})


def _layer(layer: nn.Module, heads: _Heads, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Forward method of a fused layer, with the signature of the original. [1, T, W]"""
    packing = options.get("packing")
    if args or hidden_states.dtype != torch.float32 or not isinstance(packing, PackedLayout):
        result: Tensor = type(layer).forward(layer, hidden_states, *args, **options)
        return result
    compute = partial(_compute, layer, heads, packing=packing, tables=options["position_embeddings"])
    if layer.training and getattr(layer, "gradient_checkpointing", False):
        # transformers does this in the method that is replaced here.
        saving: Tensor = layer._gradient_checkpointing_func(compute, hidden_states)  # type: ignore[operator]
        return saving
    return compute(hidden_states)


def _compute(
    layer: nn.Module, heads: _Heads, hidden_states: Tensor, *, packing: PackedLayout, tables: tuple[Tensor, Tensor]
) -> Tensor:
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    has_norms = hasattr(attention, "q_norm")
    tables = tables[0].squeeze(0).unsqueeze(1), tables[1].squeeze(0).unsqueeze(1)
    qkv = _Project.apply(  # type: ignore[no-untyped-call]
        hidden_states,
        heads,
        tables,
        _weight(layer, "input_layernorm"),
        *(_weight(attention, f"{name}_proj") for name in "qkv"),
        _weight(attention, "q_norm") if has_norms else None,
        _weight(attention, "k_norm") if has_norms else None,
    )
    mixed = attend_joined(
        qkv, num_heads=heads.num, num_kv_heads=heads.num_kv, packing=packing, scale=heads.scale, window=heads.window
    )
    out: Tensor = _MixAndMlp.apply(  # type: ignore[no-untyped-call]
        mixed.flatten(1),
        hidden_states,
        heads.eps,
        _weight(attention, "o_proj"),
        _weight(layer, "post_attention_layernorm"),
        *(_weight(mlp, f"{name}_proj") for name in ("gate", "up", "down")),
    )
    return out


def _weight(module: nn.Module, name: str) -> Tensor:
    weight = module.get_submodule(name).weight
    assert isinstance(weight, Tensor), f"{name} has a weight"
    return weight


class _Project(torch.autograd.Function):
    """norm -> queries, keys and values -> norms of queries and keys -> rotation. [T, J, D]"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: _Heads, tables: tuple[Tensor, Tensor], norm: Tensor, *weights: Tensor | None
    ) -> Tensor:
        """`weights`: of the projections to queries, keys and values, and of the norms of queries and keys, or None."""
        (cos, sin), (wq, wk, wv, q_norm, k_norm) = tables, weights
        assert wq is not None and wk is not None and wv is not None
        x_TW = x.flatten(0, 1)
        xn, rstd = _normed(x_TW, heads.eps)
        h = xn * norm
        # The first H + K of the J heads are rotated, the values are not.
        num_rotated = heads.num + heads.num_kv
        qkv = product(h, torch.cat((wq, wk, wv))).view(len(h), num_rotated + heads.num_kv, heads.width)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        qkn = qk_rstd = None
        if q_norm is not None and k_norm is not None:
            qkn, qk_rstd = _normed(qk, heads.eps)
            qk = qkn * _head_weights(q_norm, k_norm, heads)
        out = torch.empty_like(qkv)
        _rotate(qk, cos, sin, out=out[:, :num_rotated])
        out[:, num_rotated:] = v
        ctx.heads = heads
        ctx.save_for_backward(xn, rstd, h, qkn, qk_rstd, cos, sin, norm, wq, wk, wv, q_norm, k_norm)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        heads: _Heads = ctx.heads
        xn, rstd, h, qkn, qk_rstd, cos, sin, norm, wq, wk, wv, q_norm, k_norm = ctx.saved_tensors
        num_rotated = heads.num + heads.num_kv
        d_qkv = torch.empty_like(grad, memory_format=torch.contiguous_format)
        d_qk = d_qkv[:, :num_rotated]
        # The transpose of a rotation is the rotation by the negative angle.
        _rotate(grad[:, :num_rotated], cos, -sin, out=d_qk)
        d_qkv[:, num_rotated:] = grad[:, num_rotated:]
        d_qn = d_kn = None
        if q_norm is not None:
            weights = _head_weights(q_norm, k_norm, heads)
            dw = _norm_backward(d_qk, qkn, qk_rstd, weights)
            d_qn, d_kn = dw[: heads.num].sum(dim=0), dw[heads.num :].sum(dim=0)
        d_qkv = d_qkv.flatten(1)
        d_h = product(d_qkv, torch.cat((wq, wk, wv)).t())
        dq = dk = dv = None
        if any(ctx.needs_input_grad[4:7]):
            dq, dk, dv = torch.split(weight_gradient(d_qkv, h), [len(wq), len(wk), len(wv)])
        d_norm = _norm_backward(d_h, xn, rstd, norm)
        return d_h.unsqueeze(0), None, None, d_norm, dq, dk, dv, d_qn, d_kn


class _MixAndMlp(torch.autograd.Function):
    """Output projection, residual, norm and gated MLP, from the result of attention and the layer's input. [1, T, W]"""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, x: Tensor, eps: float, *weights: Tensor) -> Tensor:
        """`weights`: of the output projection, of the norm, and of gate, up and down of the MLP."""
        wo, norm, w_gate, w_up, w_down = weights
        x_TW = product(mixed, wo).add_(x.flatten(0, 1))
        xn, rstd = _normed(x_TW, eps)
        h = xn * norm
        gate_up = product(h, torch.cat((w_gate, w_up)))
        gate, up = gate_up.chunk(2, dim=1)
        active = F.silu(gate)
        out = product(active * up, w_down).add_(x_TW)
        ctx.save_for_backward(mixed, xn, rstd, h, gate_up, active, wo, norm, w_gate, w_up, w_down)
        # A plain tensor, not a view: FSDP warns about views of its outputs.
        fresh: Tensor = torch.ops.aten._unsafe_view(out, x.shape)
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0].flatten(0, 1)
        mixed, xn, rstd, h, gate_up, active, wo, norm, w_gate, w_up, w_down = ctx.saved_tensors
        needs = ctx.needs_input_grad
        gate, up = gate_up.chunk(2, dim=1)
        d_down = weight_gradient(grad, active * up) if needs[7] else None
        d_inner = product(grad, w_down.t())
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=1)
        # d_up before d_gate: `mul_` overwrites d_inner.
        torch.mul(d_inner, active, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_inner.mul_(up), gate, grad_input=d_gate)
        dg = du = None
        if needs[5] or needs[6]:
            dg, du = torch.split(weight_gradient(d_gate_up, h), [len(w_gate), len(w_up)])
        d_x = product(d_gate_up, torch.cat((w_gate, w_up)).t())
        d_norm = _norm_backward(d_x, xn, rstd, norm)
        d_x.add_(grad)  # the residual connection
        d_wo = weight_gradient(d_x, mixed) if needs[3] else None
        d_mixed = product(d_x, wo.t())
        return d_mixed, d_x.unsqueeze(0), None, d_wo, d_norm, dg, du, d_down


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm: x / sqrt(mean x^2 + eps) over the last dim, and the factor [..., 1]."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * rstd, rstd


def _norm_backward(grad: Tensor, xn: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Turns the gradient of `xn * weight` into that of x, in place; returns that of the weight, over all tokens.

    d x = rstd (g - xn mean(g xn)) with g = grad * weight.
    """
    products = grad * xn
    of_weight = products.sum(dim=0)
    means = products.mul_(weight).mean(dim=-1, keepdim=True)
    grad.mul_(weight).addcmul_(xn, means, value=-1).mul_(rstd)
    return of_weight


def _head_weights(q_norm: Tensor, k_norm: Tensor, heads: _Heads) -> Tensor:
    """Norm weights of all rotated heads, a row each. [H + K, D]"""
    return torch.cat((q_norm.expand(heads.num, -1), k_norm.expand(heads.num_kv, -1)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Writes x cos + (-x_high, x_low) sin; -sin inverts it. cos and sin are [T, 1, D], with equal halves."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(high, sin[..., :half], value=-1)
    out[..., half:].addcmul_(low, sin[..., half:])
