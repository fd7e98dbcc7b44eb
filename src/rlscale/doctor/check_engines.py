"""Checks of engines: tokens per second, and logprobs compared with those of the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from rlscale.config import ComputeDtype
from rlscale.config.passthrough.sglang_python import find_python, installed_packages
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, SkipCheck
from rlscale.doctor.tiny_engine import GROUP_SIZE, answers_as_batch, embedded_launch, generate, running_engine
from rlscale.doctor.tiny_training import build_spec, build_tiny_model, plan_one_step, world_of_one
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.training.fsdp.backend import FsdpBackend

FIELDS: Mapping[str, Mapping[str, int]] = {
    "cpu": {},
    "cuda": {
        "num_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
NUM_PROMPTS = {"cpu": 8, "cuda": 32}
RESPONSE_LEN = {"cpu": 16, "cuda": 128}
EXACT, ROUNDED = 1e-4, 0.05
"""Largest mean difference of logprobs in float32 and in bfloat16."""


def embedded_engine(context: CheckContext) -> CheckResult:
    """The embedded engine: rate, and logprobs in the dtype that runs on this device by default."""
    device = context.device
    dtype = ComputeDtype.bfloat16 if device == "cuda" else ComputeDtype.float32
    model = build_tiny_model(context.models, **FIELDS[device])
    launch = embedded_launch(model, device=device, dtype=dtype, num_slots=NUM_PROMPTS[device] * GROUP_SIZE)
    return _check_engine(context, launch, model, dtype=dtype)


def sglang_engine(context: CheckContext) -> CheckResult:
    """A real SGLang server, without CUDA graphs, whose capture takes longer than the deadline."""
    python = find_python(None)
    packages = installed_packages(python)
    if packages is None or packages.sglang is None:
        raise SkipCheck(f"SGLang is not installed in {python}")
    model = build_tiny_model(context.models, **FIELDS[context.device])
    launch = SglangLaunch(
        name="engine",
        model_path=model,
        dtype=ComputeDtype.bfloat16,
        device=context.device,
        max_context_len=None,
        num_threads=1,
        seed=0,
        python=python,
        server_args={"disable_cuda_graph": True, "mem_fraction_static": 0.3},
    )
    return _check_engine(context, launch, model, dtype=ComputeDtype.bfloat16)


def _check_engine(context: CheckContext, launch: EngineLaunch, model: str, *, dtype: ComputeDtype) -> CheckResult:
    """Rate of an engine, and its logprobs against those of the trainer for the same tokens."""
    device = context.device
    with running_engine(launch, context.folder) as address:
        prompts, answers, seconds = generate(
            address, num_prompts=NUM_PROMPTS[device], response_len=RESPONSE_LEN[device], vocab_size=101
        )
    batch = answers_as_batch(prompts, answers)
    num_tokens = sum(len(answer.output_ids) for each in answers for answer in each)
    with world_of_one(device):
        backend = FsdpBackend(build_spec(model, device=device, dtype=dtype), rank=0, world_size=1)
        metrics = backend.train(batch, plan_one_step(batch, max_tokens=8192)).metrics
    limit = EXACT if dtype == ComputeDtype.float32 else ROUNDED
    mean = metrics["logprob_diff/mean"]
    verdict = CheckVerdict.ok if mean <= limit else CheckVerdict.failed
    return CheckResult(
        verdict=verdict,
        summary=f"{num_tokens} tokens in {dtype}; mean difference of logprobs {mean:.2g} (limit {limit:g})",
        figures=(
            Figure(name="rate", value=num_tokens / seconds, unit="tokens/s"),
            Figure(name="concurrent samples", value=float(NUM_PROMPTS[device] * GROUP_SIZE)),
            Figure(name="mean difference of logprobs", value=mean),
            Figure(name="largest difference of logprobs", value=metrics.get("logprob_diff/max", float("nan"))),
        ),
        next_step="compare the same prompt with `rollout=embedded`, whose layers the trainer tests against"
        if verdict == CheckVerdict.failed
        else "",
    )
