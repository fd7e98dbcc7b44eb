"""Checks of speed: MFU of a whole optimiser step, compared with the measured rate of matrix products.

MFU is the operations of `Architecture.forward_flops`, three times for forward and backward pass, divided by the time of
the step and by a rate. Operations that are computed again (activation recomputation) do not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from rlscale.architectures.architecture import Architecture
from rlscale.config import ComputeDtype
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure
from rlscale.doctor.tiny_training import (
    build_random_batch,
    build_spec,
    plan_one_step,
    with_checkpointing,
    world_of_one,
)
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.model import DTYPES
from rlscale.training.profiling.device_rate import measure_matmul, synchronize
from rlscale.types import TrainBatch

SAMPLE_LEN, PROMPT_LEN = 4096, 512
TOKENS = (4096, 16384, 65536)
"""Tokens of a micro-batch, which is a whole step; samples have `SAMPLE_LEN` tokens."""

MIN_MFU = 0.15
"""Below this share of the measured rate at the largest size a step is reported as slow."""

BLOCK = 1 << 20
STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a Qwen3 and of the steps that are measured."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936
    tied: bool = True
    sample_len: int = SAMPLE_LEN
    prompt_len: int = PROMPT_LEN
    tokens: tuple[int, ...] = TOKENS


SHAPES: Mapping[str, Shape] = {
    "small": Shape(
        layers=2,
        width=256,
        mlp=768,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocabulary=512,
        sample_len=128,
        prompt_len=16,
        tokens=(256, 1024),
    ),
    "0.6B": Shape(layers=28, width=1024, mlp=3072, heads=16, kv_heads=8),
    "1.7B": Shape(layers=28, width=2048, mlp=6144, heads=16, kv_heads=8),
    "4B": Shape(layers=36, width=2560, mlp=9728, heads=32, kv_heads=8),
}


def mfu_small(context: CheckContext) -> CheckResult:
    return _measure(context, "small")


def mfu_0_6b(context: CheckContext) -> CheckResult:
    return _measure(context, "0.6B")


def mfu_1_7b(context: CheckContext) -> CheckResult:
    return _measure(context, "1.7B")


def mfu_4b(context: CheckContext) -> CheckResult:
    return _measure(context, "4B")


def _measure(context: CheckContext, name: str) -> CheckResult:
    shape, device = SHAPES[name], context.device
    dtype = ComputeDtype.bfloat16 if device == "cuda" else ComputeDtype.float32
    began = time.perf_counter()
    folder = context.folder / "model"
    architecture = write_random_qwen3(folder, shape)
    figures = [Figure(name="parameters", value=architecture.parameters / 1e9, unit="billion")]
    with world_of_one(device):
        spec = with_checkpointing(build_spec(str(folder), device=device, dtype=dtype))
        backend = FsdpBackend(spec, rank=0, world_size=1)
        figures.append(Figure(name="model on the device after", value=time.perf_counter() - began, unit="s"))
        rate = measure_matmul(device, DTYPES[dtype])
        figures.append(Figure(name=f"measured rate, {dtype}", value=rate / 1e12, unit="TFLOP/s"))
        shares = []
        for tokens in shape.tokens:
            found = _measure_step(backend, architecture, shape, tokens=tokens, device=device)
            if found is None:
                figures.append(Figure(name=f"{tokens} tokens", value="out of memory"))
                break
            seconds, flops = found
            shares.append(flops / seconds / rate)
            figures += [
                Figure(name=f"{tokens} tokens", value=seconds, unit="s"),
                Figure(name=f"MFU at {tokens} tokens", value=100 * shares[-1], unit="% of the measured rate"),
            ]
    return _judge(shares, shape, figures, device=device)


def _judge(shares: list[float], shape: Shape, figures: list[Figure], *, device: str) -> CheckResult:
    if not shares:
        text = f"a step of {shape.tokens[0]} tokens does not fit"
        return CheckResult(verdict=CheckVerdict.failed, summary=text, figures=tuple(figures))
    summary = f"best {100 * max(shares):.0f} % of the measured rate; samples of {shape.sample_len} tokens"
    verdict, next_step = CheckVerdict.ok, ""
    if len(shares) < len(shape.tokens):
        verdict, next_step = CheckVerdict.warning, "set batch.max_tokens_per_gpu to the largest size that fits"
    if device == "cuda" and max(shares) < MIN_MFU:
        verdict = CheckVerdict.warning
        next_step = "profile a step with debug.profile_rollouts=[1]: kernels or the CPU that starts them are slow"
    return CheckResult(verdict=verdict, summary=summary, figures=tuple(figures), next_step=next_step)


def _measure_step(
    backend: FsdpBackend, architecture: Architecture, shape: Shape, *, tokens: int, device: str
) -> tuple[float, float] | None:
    """Seconds and operations of a step, the second one of its size; None: the device has too little memory."""
    batch = _make_batch(shape, tokens)
    plans = plan_one_step(batch, max_tokens=tokens)
    assert len(plans) == 1 and len(plans[0].microbatches[0]) == 1, "the step must be one micro-batch"
    try:
        backend.train(batch, plans)
        synchronize(device)
        began = time.perf_counter()
        backend.train(batch, plans)
        synchronize(device)
    except torch.OutOfMemoryError:
        return None
    pairs = architecture.forward_cost.count_pairs(shape.sample_len)
    forward = architecture.forward_flops(
        tokens=tokens, context=pairs / shape.sample_len, logit_rows=float(batch.loss_mask.sum())
    )
    return time.perf_counter() - began, 3 * forward


def _make_batch(shape: Shape, tokens: int) -> TrainBatch:
    lengths = [(shape.prompt_len, shape.sample_len - shape.prompt_len)] * (tokens // shape.sample_len)
    return build_random_batch(lengths, vocab_size=shape.vocabulary)


def write_random_qwen3(folder: Path, shape: Shape) -> Architecture:
    """Writes a random Qwen3 in bfloat16 and returns its architecture.

    Drawing four billion values takes half a minute: every matrix repeats the same block of a million.
    """
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=max(shape.tokens),
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    block = (torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * STD).to(torch.bfloat16)
    tied = {"lm_head.weight"} if shape.tied else set()
    weights = {name: _repeat(block, p.shape) for name, p in shell.named_parameters() if name not in tied}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return Architecture.from_config_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _repeat(block: Tensor, shape: torch.Size) -> Tensor:
    """A matrix of repetitions of the block; a vector, the weight of a norm, of ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=block.dtype)
    count = shape.numel()
    return block.repeat(-(-count // len(block)))[:count].view(shape).clone()
