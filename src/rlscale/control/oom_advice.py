"""Config keys to change, added to an out-of-memory error."""

from __future__ import annotations

import re

from rlscale.config import Device, EngineKind, RunConfig, TrainBackendName
from rlscale.config.rules import server_groups
from rlscale.errors import EngineError, WorkerError

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\bMemoryError\b|CUDA out of memory|HIP out of memory|CUDA error: out of memory"
    r"|can't allocate memory|Cannot allocate memory|bad_alloc|Not enough memory|Unable to allocate"
    r"|node running low on memory",
    re.IGNORECASE,
)
"""Out-of-memory messages of torch, numpy, SGLang, Ray and the C library."""

_MAYBE_OUT_OF_MEMORY = re.compile(r"status -9\b|SIGKILL|could not create a primitive")
"""A process killed by the kernel's OOM killer, and oneDNN without memory. Both have other causes, too."""

_WEIGHTS_TOO_LARGE = re.compile(r"increase --?mem-fraction-static|Not enough memory", re.IGNORECASE)
"""SGLang cannot fit the weights and any cache into its share of the memory."""


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text reports that the memory is used up."""
    return _OUT_OF_MEMORY.search(text) is not None


def with_memory_advice(error: Exception, config: RunConfig) -> Exception:
    """The same error; after an out-of-memory error, with the keys to change and their values.

    Args:
        error: of a run.
        config: of that run.
    """
    text = str(error)
    is_certain = is_out_of_memory(text)
    if not is_certain and not _MAYBE_OUT_OF_MEMORY.search(text):
        return error
    if isinstance(error, WorkerError):
        is_engine = error.worker.startswith("engine")
        changes = _engine_changes(config, text) if is_engine else _trainer_changes(config)
        cause = f"{error.cause}\n{_advice(changes, config, is_certain=is_certain)}"
        return WorkerError(error.worker, cause, failed_at_s=error.failed_at_s, died=error.died)
    if isinstance(error, EngineError):
        return EngineError(f"{error}\n{_advice(_engine_changes(config, text), config, is_certain=is_certain)}")
    return error


def _trainer_changes(config: RunConfig) -> list[str]:
    batch, cluster = config.batch, config.cluster
    changes = []
    if batch.use_dynamic_batch_size:
        changes.append(f"lower batch.max_tokens_per_gpu (now {batch.max_tokens_per_gpu})")
        if batch.log_probs_max_tokens_per_gpu != batch.max_tokens_per_gpu:
            changes.append(f"lower batch.log_probs_max_tokens_per_gpu (now {batch.log_probs_max_tokens_per_gpu})")
    elif batch.micro_batch_size > 1:
        changes.append(f"lower batch.micro_batch_size (now {batch.micro_batch_size})")
    if config.train.backend == TrainBackendName.fsdp and not config.fsdp.gradient_checkpointing:
        changes.append("set fsdp.gradient_checkpointing=true")
    changes.append(f"lower rollout.max_response_len (now {config.rollout.max_response_len})")
    if cluster.colocate and config.rollout.engine == EngineKind.sglang:
        changes.append(f"lower sglang.mem_fraction_static (now {_or_default(config.sglang.mem_fraction_static)})")
    number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    changes.append(f"train on more ranks, cluster.actor_num_gpus_per_node (now {number} ranks)")
    return changes


def _engine_changes(config: RunConfig, text: str) -> list[str]:
    cluster, rollout = config.cluster, config.rollout
    more_gpus = f"raise cluster.rollout_num_gpus_per_engine (now {cluster.rollout_num_gpus_per_engine})"
    if groups := server_groups(config):
        sizes = " and ".join(f"{each.num_gpus_per_engine} for {each.role}" for each in groups)
        more_gpus = f"raise num_gpus_per_engine in the file of sglang.config (now {sizes})"
    if rollout.engine == EngineKind.embedded:
        length = rollout.max_context_len or rollout.max_response_len
        key = "max_context_len" if rollout.max_context_len else "max_response_len"
        changes = [f"lower rollout.num_slots (now {rollout.num_slots})", f"lower rollout.{key} (now {length})"]
        if (cluster.rollout_num_gpus or 0) > 1:
            changes.append(f"start fewer engines, cluster.rollout_num_gpus (now {cluster.rollout_num_gpus})")
        return changes
    fraction = _or_default(config.sglang.mem_fraction_static)
    # The opposite advice: the share is too small for the weights, so that a smaller one cannot help.
    if _WEIGHTS_TOO_LARGE.search(text):
        return [f"raise sglang.mem_fraction_static (now {fraction}): weights and cache do not fit in it", more_gpus]
    return [
        f"lower sglang.mem_fraction_static (now {fraction})",
        "lower sglang.chunked_prefill_size or sglang.max_running_requests",
        f"lower sglang.server_concurrency (now {config.sglang.server_concurrency})",
        more_gpus,
    ]


def _advice(changes: list[str], config: RunConfig, *, is_certain: bool) -> str:
    place = "memory of its machine" if config.cluster.device == Device.cpu else "memory of its GPU"
    maybe = "if the kernel killed it because it was out of memory (`dmesg` lists such processes)"
    cause = f"the {place} is used up" if is_certain else maybe
    return f"{cause}: {', or '.join(changes)}; rlscale-plan prints the memory that each part needs"


def _or_default(value: object) -> object:
    return "SGLang's default" if value is None else value
