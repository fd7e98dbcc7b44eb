"""Checks of Ray and of a whole run."""

from __future__ import annotations

import math
import time

from rlscale.cluster.ray_session import ray_session
from rlscale.config import RunConfig, load_config
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure
from rlscale.driver.trainer import Trainer
from rlscale.observe.jsonl import read_records
from rlscale.plan.placement import build_cluster_layout

NUM_ROLLOUTS = 5
MAX_DIFFERENCE = 1e-3
"""Largest mean difference of logprobs of trainer and engine; both compute in float32."""


def ray_start(context: CheckContext) -> CheckResult:
    """Starts Ray as a run does, and compares its GPUs with those that a run needs."""
    config = _compose(context).cluster
    began = time.perf_counter()
    with ray_session(config, build_cluster_layout(config, needs_engines=True)) as session:
        session.wait()
        seconds = time.perf_counter() - began
    where = "a GPU" if config.device == "cuda" else "two slots in place of GPUs"
    return CheckResult(
        verdict=CheckVerdict.ok,
        summary=f"Ray started and has {where}",
        figures=(Figure(name="start", value=seconds, unit="s"),),
    )


def quickstart(context: CheckContext) -> CheckResult:
    """The quickstart without its warm-up: on one GPU trainer and engine share it, and weights go by CUDA IPC."""
    config = _compose(context)
    began = time.perf_counter()
    result = Trainer(config).run()
    seconds = time.perf_counter() - began
    records = [r for r in read_records(result.run_dir / "metrics.jsonl") if "logprob_diff/mean" in r]
    difference = max((float(r["logprob_diff/mean"]) for r in records), default=math.nan)
    losses = [float(r["loss"]) for r in records if "loss" in r]
    is_right = len(records) == NUM_ROLLOUTS and difference <= MAX_DIFFERENCE and all(map(math.isfinite, losses))
    return CheckResult(
        verdict=CheckVerdict.ok if is_right else CheckVerdict.failed,
        summary=f"{len(records)} of {NUM_ROLLOUTS} rollouts; logprobs of trainer and engine differ by {difference:.2g}",
        figures=(
            Figure(name="whole run", value=seconds, unit="s"),
            Figure(name="largest mean difference of logprobs", value=difference),
        ),
    )


def _compose(context: CheckContext) -> RunConfig:
    """The quickstart on this machine: a trainer and an engine, on one GPU together."""
    overrides = [
        "+experiment=quickstart",
        f"data.num_rollout={NUM_ROLLOUTS}",
        "model.warmup_experiment=null",
        f"model.cache_dir={context.folder / 'cache'}",
        f"run.dir={context.folder / 'run'}",
        "eval.interval=null",
        "eval.stop_reward=null",
        "logging.console=plain",
    ]
    if context.device == "cuda":
        overrides += [
            "cluster.device=cuda",
            "cluster.distributed_backend=nccl",
            "cluster.colocate=true",
            "cluster.offload_train_mode=move",
            "cluster.num_gpus_per_node=1",
            # The kernel that comes with torch; the check `attention` reports whether flash-attn is installed.
            "fsdp.attn_implementation=sdpa",
        ]
    return load_config(overrides)
