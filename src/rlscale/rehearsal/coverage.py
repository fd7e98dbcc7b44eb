"""Parts of a run that a rehearsal covers, and those that it replaces."""

from __future__ import annotations

from collections.abc import Sequence

from rlscale.config import (
    EngineKind,
    OffloadMode,
    RunConfig,
    TrainBackendName,
    WeightChannelName,
    uses_critic,
    uses_reference,
    uses_teacher,
)
from rlscale.config.rules import uses_engines
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.rehearsal.cut_layout import LayoutSizes
from rlscale.rehearsal.rehearsal_config import CPU_CORE_ARGS, NUM_ROLLOUTS, RESPONSE_TOKENS
from rlscale.rehearsal.rehearsal_report import Row


def describe_layout(config: RunConfig, sizes: LayoutSizes) -> str:
    """Nodes, ranks, parallel sizes and engines in one line."""
    parallel = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context, "EP": sizes.expert, "DP": sizes.data}
    named = " ".join(f"{name}{size}" for name, size in parallel.items() if size > 1 or name == "DP")
    parts = [_count(sizes.cluster_nodes, "node"), f"{_count(sizes.ranks, 'trainer')} ({config.train.backend} {named})"]
    if sizes.critic_ranks:
        parts.append(_count(sizes.critic_ranks, "critic rank"))
    if sizes.engines:
        kinds = [("engine", sizes.engines, sizes.gpus_per_engine)]
        if sizes.prefill_engines:
            kinds = [("prefill engine", sizes.prefill_engines, sizes.gpus_per_prefill_engine)]
            kinds.append(("decode engine", sizes.engines, sizes.gpus_per_engine))
        engines = [_describe_engines(*each, node=sizes.gpus_per_node) for each in kinds]
        parts.append(" and ".join(engines) + (", colocated" if sizes.colocate else ""))
    return ", ".join(parts)


def _describe_engines(kind: str, number: int, gpus: int, *, node: int) -> str:
    nodes = -(-gpus // node)
    each = f" on {_count(nodes, 'node')} each" if nodes > 1 else ""
    return f"{_count(number, kind)} of {_count(gpus, 'GPU')}{each}"


def list_rehearsed(config: RunConfig, sizes: LayoutSizes, hooks: Sequence[str]) -> tuple[Row, ...]:
    """Parts that ran as in the real run.

    Args:
        hooks: keys with functions of the user.
    """
    roles = ["policy"]
    roles += ["critic"] * uses_critic(config.algo) + ["reference"] * uses_reference(config.algo)
    roles += ["teacher"] * (uses_teacher(config.algo) and config.model.teacher_load is not None)
    rows = [
        ("config", "every rule between keys, for the uncut layout and for the rehearsed one"),
        (
            "placement",
            f"placement group on {_count(sizes.cluster_nodes, 'Ray node')} of {sizes.gpus_per_node} GPUs",
        ),
        ("trainers", f"{sizes.ranks} processes with {', '.join(roles)}; all process groups of the backend"),
    ]
    if (mtp := MtpLayers.from_config(config)).number:
        layers = f"{_count(mtp.number, 'layer')} on the last stage, {'trained' if mtp.is_trained else 'frozen'}"
        rows.append(("multi-token prediction", layers))
    if sizes.engines:
        servers = _count(sizes.servers, "server")
        rows.append(("engines", f"arguments and environment of {servers}, in logs/*_launch.json"))
        rows.append(("weight sync", f"{config.train.weight_channel}: every weight, each compared by checksum"))
        rows.append(("rollouts", f"{NUM_ROLLOUTS} with prompts, chat template, requests, rewards and advantages"))
    else:
        rows.append(("rollouts", f"{NUM_ROLLOUTS} batches of labels"))
    if config.eval.interval is not None and uses_engines(config):
        rows.append(("evaluation", "every set, before and during training"))
    rows.append(("steps", "forward, backward and optimiser on every rank"))
    if config.checkpoint.save_final or config.checkpoint.save_interval:
        rows.append(("checkpoint", "saved by all ranks of the backend; Hugging Face export"))
    rows += [("your code", key) for key in hooks]
    return tuple(rows)


def list_not_rehearsed(config: RunConfig, sizes: LayoutSizes, *, is_embedded: bool, routes: bool) -> tuple[Row, ...]:
    """Parts of the run that something else replaced.

    Args:
        config: of the run on GPUs, uncut.
        sizes: of the rehearsal.
        is_embedded: the embedded engine served the tiny model, not the scripted one.
        routes: requests went through the router.
    """
    rows: list[Row] = [
        ("GPUs, NCCL, memory and speed", "CPU and gloo; see rlscale-plan for memory and time"),
        ("the model and its tokenizer", "a random model of the same family with one token per byte"),
        ("lengths and batch", f"{RESPONSE_TOKENS} tokens per response, the smallest batch that the ranks divide"),
        ("rewards that learning needs", "the reward of the run, plus 0 or 1 at random"),
    ]
    if config.train.dtype != "float32":
        rows.append((f"train.dtype={config.train.dtype}", "float32"))
    rows += _backend_rows(config)
    if sizes.engines:
        rows += _engine_rows(config, sizes, is_embedded=is_embedded, routes=routes)
    if config.cluster.offload_train and config.cluster.offload_train_mode == OffloadMode.tms:
        rows.append(("cluster.offload_train_mode=tms", "move"))
    if config.model.warmup_experiment is not None:
        rows.append((f"model.warmup_experiment={config.model.warmup_experiment}", "no warm-up"))
    starts = {"checkpoint.load": config.checkpoint.load, "critic.load": config.critic.load}
    rows += [(f"{key}={value}", "the random model") for key, value in starts.items() if value is not None]
    for name in ("wandb", "tensorboard"):
        if getattr(config.logging, name).enabled:
            rows.append((f"logging.{name}", "no tracker"))
    if config.ci.enabled:
        rows.append(("ci", "no limits of metrics"))
    return tuple(rows)


def _backend_rows(config: RunConfig) -> list[Row]:
    if config.train.backend != TrainBackendName.megatron:
        kernel = config.fsdp.attn_implementation
        return [] if kernel in ("sdpa", "eager") else [(f"fsdp.attn_implementation={kernel}", "sdpa")]
    rows: list[Row] = [("Transformer Engine", "Megatron-core's own layers")]
    given = config.megatron.core_args
    for name in sorted(given.keys() & CPU_CORE_ARGS.keys()):
        if given[name] != CPU_CORE_ARGS[name]:
            rows.append((f"megatron.{name}={given[name]}", f"{CPU_CORE_ARGS[name]}"))
    return rows


def _engine_rows(config: RunConfig, sizes: LayoutSizes, *, is_embedded: bool, routes: bool) -> list[Row]:
    served = "the embedded engine" if is_embedded else "a scripted engine: its logprobs are not those of the model"
    rows: list[Row] = []
    if config.rollout.engine != EngineKind.embedded:
        rows.append((f"rollout.engine={config.rollout.engine}", served))
    if (ranks := max(sizes.gpus_per_engine, sizes.gpus_per_prefill_engine)) > 1:
        rows.append((f"{ranks} ranks of an engine", "one server per node; the first gets weights"))
    if sizes.prefill_engines:
        rows.append(("prefill and decode servers", "each computes whole requests"))
    if config.router.enabled and not routes:
        rows.append(("router", "requests go to the engines directly"))
    if config.train.weight_channel == WeightChannelName.shared_memory and config.cluster.device == "cuda":
        rows.append(("CUDA IPC", "a ring in shared memory"))
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
