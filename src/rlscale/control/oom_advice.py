"""A failure for want of memory names the keys that ask for it."""

from __future__ import annotations

import re

from rlscale.config import Device, EngineKind, RunConfig, TrainBackendName
from rlscale.errors import EngineError, WorkerError

_MARKS = re.compile(
    r"OutOfMemoryError|\bMemoryError\b|CUDA out of memory|HIP out of memory|CUDA error: out of memory"
    r"|can't allocate memory|Cannot allocate memory|bad_alloc|Not enough memory|Unable to allocate"
    r"|node running low on memory",
    re.IGNORECASE,
)
"""How torch, numpy, SGLang, Ray and the C library say that memory is used up."""

_PERHAPS = re.compile(r"status -9\b|SIGKILL|could not create a primitive")
"""What is left of a process that the kernel ended for want of memory, and what oneDNN says then; both may mean other
things."""

_WEIGHTS_TOO_LARGE = re.compile(r"increase --?mem-fraction-static|Not enough memory", re.IGNORECASE)
"""SGLang cannot place weights and any cache in its share."""


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text says that memory was used up."""
    return _MARKS.search(text) is not None


def with_memory_advice(error: Exception, config: RunConfig) -> Exception:
    """The same error; when memory was used up, with the keys to change, their values, and where.

    Args:
        error: of a run.
        config: of that run.
    """
    text = str(error)
    certain = is_out_of_memory(text)
    if not certain and not _PERHAPS.search(text):
        return error
    if isinstance(error, WorkerError):
        on_engine = error.worker.startswith("engine")
        steps = _engine_steps(config, text) if on_engine else _trainer_steps(config)
        cause = f"{error.cause}\n{_told(steps, config, certain=certain)}"
        return WorkerError(error.worker, cause, failed_at_s=error.failed_at_s, died=error.died)
    if isinstance(error, EngineError):
        return EngineError(f"{error}\n{_told(_engine_steps(config, text), config, certain=certain)}")
    return error


def _trainer_steps(config: RunConfig) -> list[str]:
    batch, cluster = config.batch, config.cluster
    steps = []
    if batch.use_dynamic_batch_size:
        steps.append(f"lower batch.max_tokens_per_gpu (now {batch.max_tokens_per_gpu})")
        if batch.log_probs_max_tokens_per_gpu != batch.max_tokens_per_gpu:
            steps.append(f"lower batch.log_probs_max_tokens_per_gpu (now {batch.log_probs_max_tokens_per_gpu})")
    elif batch.micro_batch_size > 1:
        steps.append(f"lower batch.micro_batch_size (now {batch.micro_batch_size})")
    if config.train.backend == TrainBackendName.fsdp and not config.fsdp.gradient_checkpointing:
        steps.append("set fsdp.gradient_checkpointing=true")
    steps.append(f"lower rollout.max_response_len (now {config.rollout.max_response_len})")
    if cluster.colocate and config.rollout.engine == EngineKind.sglang:
        steps.append(f"lower sglang.mem_fraction_static (now {_or_default(config.sglang.mem_fraction_static)})")
    number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    steps.append(f"train on more ranks, cluster.actor_num_gpus_per_node (now {number} ranks)")
    return steps


def _engine_steps(config: RunConfig, text: str) -> list[str]:
    cluster, rollout = config.cluster, config.rollout
    more = f"raise cluster.rollout_num_gpus_per_engine (now {cluster.rollout_num_gpus_per_engine})"
    if rollout.engine == EngineKind.embedded:
        length = rollout.max_context_len or rollout.max_response_len
        key = "max_context_len" if rollout.max_context_len else "max_response_len"
        steps = [f"lower rollout.num_slots (now {rollout.num_slots})", f"lower rollout.{key} (now {length})"]
        if (cluster.rollout_num_gpus or 0) > 1:
            steps.append(f"start fewer engines, cluster.rollout_num_gpus (now {cluster.rollout_num_gpus})")
        return steps
    fraction = _or_default(config.sglang.mem_fraction_static)
    if _WEIGHTS_TOO_LARGE.search(text):
        return [f"raise sglang.mem_fraction_static (now {fraction}), as weights and cache do not fit in it", more]
    return [
        f"lower sglang.mem_fraction_static (now {fraction})",
        "lower sglang.chunked_prefill_size or sglang.max_running_requests",
        f"lower sglang.server_concurrency (now {config.sglang.server_concurrency})",
        more,
    ]


def _told(steps: list[str], config: RunConfig, *, certain: bool) -> str:
    where = "the memory of its machine" if config.cluster.device == Device.cpu else "the memory of its GPU"
    perhaps = "if it was for want of memory (`dmesg` tells of processes that the kernel ended)"
    begin = f"it used up {where}" if certain else perhaps
    return f"{begin}: {', or '.join(steps)}; rlscale-plan shows what each part needs"


def _or_default(value: object) -> object:
    return "SGLang's choice" if value is None else value
