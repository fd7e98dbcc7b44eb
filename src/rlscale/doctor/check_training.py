"""Checks of training on FSDP2: a step, the attention over packed samples, and LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from rlscale.config import AttnImplementation, ComputeDtype, LoraConfig
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, SkipCheck, largest, worst
from rlscale.doctor.tiny_training import (
    RAGGED,
    build_random_batch,
    build_spec,
    build_tiny_model,
    plan_one_step,
    world_of_one,
)
from rlscale.training.attention.packed import build_packed_layout, packed_attention
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.profiling.device_rate import measure_seconds
from rlscale.training.spec import TrainerSpec

VOCABULARY = 101  # of the tiny model
NUM_STEPS = 2
EXACT, ROUNDED = 1e-3, 0.1
"""Largest relative difference of loss, entropy and gradient norm: in float32, and between bfloat16 and float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Metrics of each step, and the weights afterwards on the CPU."""

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]


def train_steps(spec: TrainerSpec) -> Trained:
    """Two optimiser steps over the ragged batch, in several micro-batches."""
    batch = build_random_batch(RAGGED, vocab_size=VOCABULARY)
    plans = plan_one_step(batch, max_tokens=200)
    backend = FsdpBackend(spec, rank=0, world_size=1)
    steps = [dict(backend.train(batch, plans).steps[0]) for _ in range(NUM_STEPS)]
    return Trained(steps=steps, weights={name: weight.cpu().float() for name, weight in backend.weights()})


def compare_trained(found: Trained, expected: Trained, *, limit: float) -> tuple[CheckVerdict, list[Figure]]:
    """Largest differences of two trainings; failed above the limit.

    Weights after Adam's first steps move by the learning rate whatever the size of a gradient, so that their
    differences are reported in learning rates and do not count.
    """
    relative = largest(relative_difference(a, b) for a, b in zip(found.steps, expected.steps, strict=True))
    weights = largest(float((found.weights[name] - w).abs().max()) for name, w in expected.weights.items())
    figures = [
        Figure(name="largest relative difference of loss, entropy and gradient norm", value=relative),
        Figure(name="largest difference of a weight", value=weights),
    ]
    return (CheckVerdict.ok if relative <= limit else CheckVerdict.failed), figures


def relative_difference(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Largest relative difference of the metrics of two steps; NaN if a metric is NaN."""
    names = ("loss", "grad_norm", "entropy")
    return largest(abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-2) for name in names)


def fsdp_step(context: CheckContext) -> CheckResult:
    """Steps in float32 against those on the CPU, and in bfloat16 against float32."""
    model = build_tiny_model(context.models)
    trained: dict[ComputeDtype, Trained] = {}
    with world_of_one(context.device):
        # The CPU last: its ranks make torch deterministic, for which cuBLAS needs a variable at the start.
        for dtype in (ComputeDtype.bfloat16, *([ComputeDtype.float32] if context.device == "cuda" else [])):
            trained[dtype] = train_steps(build_spec(model, device=context.device, dtype=dtype))
        expected = train_steps(build_spec(model, device="cpu"))
    verdicts, figures = [], []
    for dtype, found in trained.items():
        limit = EXACT if dtype == ComputeDtype.float32 else ROUNDED
        verdict, differences = compare_trained(found, expected, limit=limit)
        verdicts.append(verdict)
        figures += [replace(figure, name=f"{dtype}: {figure.name}") for figure in differences]
    where = f"float32 (limit {EXACT:g}) and bfloat16" if context.device == "cuda" else "bfloat16"
    return CheckResult(
        verdict=worst(verdicts),
        summary=f"{NUM_STEPS} steps in {where} (limit {ROUNDED:g}) against float32 on the CPU",
        figures=tuple(figures),
    )


# -- attention

SIZES = {"cuda": (4, 4096, 16, 8, 128), "cpu": (4, 128, 4, 2, 32)}
"""Samples, their length, heads, key heads, head dimension."""


def attention(context: CheckContext) -> CheckResult:
    """Packed attention against a plain softmax, forward and backward, and flash-attn where it is installed."""
    device = context.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    difference = _compare_attention(device, dtype)
    limit = 0.05 if dtype == torch.bfloat16 else 1e-4
    seconds, flops = _time_attention(device, dtype)
    kernel = "varlen_attn of torch" if device == "cuda" else "torch's SDPA"
    figures = [
        Figure(name="largest difference from a plain softmax", value=difference),
        Figure(
            name=f"{SIZES[device][0]} samples of {SIZES[device][1]} tokens",
            value=flops / seconds / 1e12,
            unit="TFLOP/s",
        ),
    ]
    if not difference <= limit:  # NaN fails
        text = f"{kernel}: differs from a plain softmax by more than {limit:g}"
        return CheckResult(verdict=CheckVerdict.failed, summary=text, figures=tuple(figures))
    if device != "cuda":
        return CheckResult(
            verdict=CheckVerdict.ok, summary=f"{kernel}: forward and backward are correct", figures=tuple(figures)
        )
    if find_spec("flash_attn") is None:
        return CheckResult(
            verdict=CheckVerdict.warning,
            summary=f"{kernel}: forward and backward are correct; the package flash-attn is not installed",
            figures=tuple(figures),
            next_step="set fsdp.attn_implementation=sdpa, which uses this kernel; the default needs flash-attn",
        )
    verdict, found = _compare_flash_attn(context)
    text = f"{kernel} and flash-attn: forward and backward are correct"
    return CheckResult(verdict=verdict, summary=text, figures=(*figures, *found))


def _compare_attention(device: str, dtype: torch.dtype) -> float:
    """Largest difference of outputs and gradients, relative to the largest value, on samples of different lengths."""
    _, _, heads, kv_heads, width = SIZES[device]
    lengths = np.array([3, 17, 64, 200, 333], dtype=np.int64)
    layout = build_packed_layout(lengths, device=torch.device(device))
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, total, width, generator=generator) for n in (heads, kv_heads, kv_heads)]
    outputs = []
    for run in (lambda q, k, v: packed_attention(nn.Module(), q, k, v, None, packing=layout)[0], None):
        kind = dtype if run is not None else torch.float32
        # Copies: both runs would otherwise add their gradients to one tensor.
        q, k, v = (x.to(device, kind, copy=True).requires_grad_() for x in inputs)
        out = run(q, k, v) if run is not None else _plain_attention(q, k, v, lengths.tolist())
        out.float().square().sum().backward()  # type: ignore[no-untyped-call]
        outputs.append([out, q.grad, k.grad, v.grad])
    return largest(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(*outputs, strict=True)
        if a is not None and b is not None
    )


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal softmax attention of each sample, written out. [1, T, H, D]"""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    parts = []
    for a, b, c in zip(*(torch.split(x, lengths, dim=2) for x in (q, k, v)), strict=True):
        scores = a @ b.transpose(2, 3) * a.shape[-1] ** -0.5
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        parts.append(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ c)
    return torch.cat(parts, dim=2).transpose(1, 2)


def _time_attention(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds and operations of forward and backward pass."""
    num, length, heads, kv_heads, width = SIZES[device]
    layout = build_packed_layout(np.full(num, length, dtype=np.int64), device=torch.device(device))
    q, k, v = (
        torch.randn(1, n, num * length, width, device=device).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )

    def run() -> None:
        out, _ = packed_attention(nn.Module(), q, k, v, None, packing=layout)
        out.sum().backward()  # type: ignore[no-untyped-call]

    # Two products of L^2 / 2 pairs forward; the backward pass has five and recomputes one of them.
    flops = 3.5 * 4 * num * heads * width * length**2 / 2
    return measure_seconds(run, device=device, repeats=2), flops


def _compare_flash_attn(context: CheckContext) -> tuple[CheckVerdict, list[Figure]]:
    """A step with the package flash-attn against one with torch's kernel."""
    model = build_tiny_model(context.models)
    spec = build_spec(model, device="cuda", dtype=ComputeDtype.bfloat16)
    flash = replace(spec, fsdp=replace(spec.fsdp, attn_implementation=AttnImplementation.flash_attention_2))
    with world_of_one("cuda"):
        verdict, figures = compare_trained(train_steps(flash), train_steps(spec), limit=ROUNDED)
    return verdict, [replace(figure, name=f"flash-attn: {figure.name}") for figure in figures]


# -- LoRA


def lora(context: CheckContext) -> CheckResult:
    """Steps of adapters against those on the CPU; the weights of the model must stay."""
    if find_spec("peft") is None:
        raise SkipCheck("peft is not installed; pip install 'rlscale[lora]'")
    model = build_tiny_model(context.models)
    adapters = LoraConfig(rank=8)
    with world_of_one(context.device):
        dtype = ComputeDtype.float32 if context.device == "cuda" else ComputeDtype.bfloat16
        found = train_steps(build_spec(model, device=context.device, dtype=dtype, lora=adapters))
        expected = train_steps(build_spec(model, device="cpu", lora=adapters))
        start = FsdpBackend(build_spec(model, device="cpu"), rank=0, world_size=1)
        before = {name: weight.clone() for name, weight in start.weights()}
    limit = EXACT if context.device == "cuda" else ROUNDED
    verdict, figures = compare_trained(found, expected, limit=limit)
    changed = [name for name, weight in expected.weights.items() if not torch.equal(weight, before[name])]
    if not changed or any("norm" in name or "embed" in name for name in changed):
        verdict = CheckVerdict.failed
    figures.append(Figure(name="matrices with adapters", value=float(len(changed))))
    summary = f"{NUM_STEPS} steps of adapters of rank 8 in {dtype}, against float32 on the CPU (limit {limit:g})"
    return CheckResult(verdict=verdict, summary=summary, figures=tuple(figures))
