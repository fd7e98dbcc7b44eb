"""Check of Megatron-core: a step against the same step on FSDP2."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

from rlscale.config import ComputeDtype, ModelConfig, TrainBackendName
from rlscale.config.installed import is_installed
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, SkipCheck
from rlscale.doctor.check_training import relative_difference
from rlscale.doctor.tiny_training import (
    RAGGED,
    build_random_batch,
    build_spec,
    build_tiny_model,
    plan_one_step,
    world_of_one,
)
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.registry import make_backend

VOCABULARY = 101
EXACT, ROUNDED = 1e-3, 0.1
"""Largest relative difference of loss, entropy and gradient norm in float32 and bfloat16."""


def megatron_step(context: CheckContext) -> CheckResult:
    """With Transformer Engine's layers where they can run, else with torch layers."""
    if not is_installed("megatron.core"):
        raise SkipCheck("megatron-core is not installed; pip install 'rlscale[megatron]', or use train=fsdp")
    on_gpu = context.device == "cuda"
    # Transformer Engine has attention kernels for 16 bits only.
    dtype = ComputeDtype.bfloat16 if on_gpu else ComputeDtype.float32
    model = build_tiny_model(context.models)
    batch = build_random_batch(RAGGED, vocab_size=VOCABULARY)
    plans = plan_one_step(batch, max_tokens=200)
    with world_of_one(context.device):
        fsdp = FsdpBackend(build_spec(model, device=context.device, dtype=dtype), rank=0, world_size=1)
        expected = dict(fsdp.train(batch, plans).steps[0])
        spec = replace(
            build_spec(model, device=context.device, dtype=dtype, backend=TrainBackendName.megatron),
            model=ModelConfig(use_hf_config_for_megatron=True),
        )
        found = dict(make_backend(spec, rank=0, world_size=1).train(batch, plans).steps[0])
    difference = relative_difference(found, expected)
    limit = EXACT if dtype == ComputeDtype.float32 else ROUNDED
    figures = [
        Figure(name="megatron-core", value=version("megatron-core")),
        Figure(name="largest relative difference of loss, entropy and gradient norm", value=difference),
    ]
    layers = "torch layers"
    verdict, next_step = CheckVerdict.ok, ""
    if is_installed("transformer_engine") and on_gpu:
        layers = "Transformer Engine's layers"
        figures.append(Figure(name="transformer-engine", value=version("transformer-engine")))
    elif on_gpu:
        verdict, next_step = (
            CheckVerdict.warning,
            "pip install transformer-engine[pytorch]: its kernels are much faster",
        )
    if not difference <= limit:  # NaN fails
        verdict, next_step = CheckVerdict.failed, ""
    summary = f"a step in {dtype} with {layers}, compared with FSDP2 (limit {limit:g})"
    return CheckResult(verdict=verdict, summary=summary, figures=tuple(figures), next_step=next_step)
