"""Rules about the weight sync between trainer and engines."""

from __future__ import annotations

from functools import partial

from rlscale.config.groups.cluster import Device, DistributedBackend
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    engine_views,
    has_draft_model,
    is_sft,
    opens_gpu_memory,
    pipeline_stages,
    uses_engines,
    uses_external_engines,
)
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def sync_interval_keeps_the_staleness_bound(config: RunConfig) -> list[Problem]:
    """Between two weight syncs samples get older by one update per rollout."""
    interval, staleness = config.train.update_weights_interval, config.rollout.max_staleness
    if is_sft(config) or interval <= staleness + 1:
        return []
    # Rollout r is trained as update r, so each rollout between two syncs adds one update of age.
    rule = f"be at most rollout.max_staleness + 1 = {staleness + 1}"
    fix = f"set rollout.max_staleness={interval - 1}, the age that samples reach between two weight syncs"
    return [Problem(path="train.update_weights_interval", rule=rule, value=show(interval), fix=fix)]


@rule
def shared_memory_reaches_the_engines(config: RunConfig) -> list[Problem]:
    """On a CPU trainer and engines share a machine. On GPUs each rank of an engine shares the GPU of a trainer rank."""
    cluster, problem = config.cluster, partial(_wrong_channel, WeightChannelName.shared_memory)
    if config.train.weight_channel != WeightChannelName.shared_memory or opens_gpu_memory(config):
        return []
    if config.rollout.engine == EngineKind.external:
        fix = "use train.weight_channel=process_group; the servers may be on other machines"
        return problem("process_group, disk or delta with rollout.engine=external", fix)
    if cluster.device == Device.cuda and cluster.colocate:
        # The other channel between processes, NCCL, cannot be used either: see the rule below.
        fix = "use train.weight_channel=disk; some ranks of the engines cannot open the memory of a trainer rank"
        return problem("disk with these engines", fix)
    if cluster.device == Device.cuda and uses_engines(config):
        fix = "use train.weight_channel=process_group; engines on other GPUs cannot open the memory of the trainer"
        return problem("process_group, disk or delta without cluster.colocate on GPUs", fix)
    if cluster.actor_num_nodes > 1:
        fix = "use train.weight_channel=process_group"
        return problem(f"process_group, disk or delta with cluster.actor_num_nodes={cluster.actor_num_nodes}", fix)
    return []


@rule
def ranks_of_a_group_have_separate_gpus(config: RunConfig) -> list[Problem]:
    """NCCL refuses a group in which two ranks, here of trainer and engine, use the same GPU."""
    cluster = config.cluster
    uses_nccl = cluster.device == Device.cuda and cluster.distributed_backend == DistributedBackend.nccl
    if config.train.weight_channel != WeightChannelName.process_group or not uses_nccl or not uses_engines(config):
        return []
    if not cluster.colocate or uses_external_engines(config):
        return []
    channel = WeightChannelName.shared_memory if opens_gpu_memory(config) else WeightChannelName.disk
    fix = f"use train.weight_channel={channel}; NCCL accepts no group with two ranks on one GPU"
    return _wrong_channel(WeightChannelName.process_group, f"{channel} with cluster.colocate on GPUs", fix)


@rule
def pipeline_stages_read_a_folder(config: RunConfig) -> list[Problem]:
    """SGLang numbers the ranks of a weight group within a pipeline stage, and its first stage waits for the others."""
    stages = max(pipeline_stages(each) for each in engine_views(config))
    channel, has_engines = config.train.weight_channel, uses_engines(config)
    if not has_engines or stages == 1 or channel != WeightChannelName.process_group:
        return []
    fix = "use train.weight_channel=disk; SGLang forms a weight group of one pipeline stage only"
    return _wrong_channel(WeightChannelName.process_group, f"disk with sglang.pp_size={stages}", fix)


@rule
def folders_spare_no_draft_model(config: RunConfig) -> list[Problem]:
    """SGLang 0.5.23 loads the weights of a folder into its draft model, too; other requests name the model."""
    channel, reads_folder = config.train.weight_channel, (WeightChannelName.disk, WeightChannelName.delta)
    if channel not in reads_folder or not has_draft_model(config):
        return []
    allowed = "process_group or shared_memory with sglang.speculative_draft_model_path"
    fix = "set train.weight_channel=process_group; SGLang loads a folder into its draft model, too"
    return _wrong_channel(channel, allowed, fix)


def _wrong_channel(channel: WeightChannelName, allowed: str, fix: str) -> list[Problem]:
    return [Problem(path="train.weight_channel", rule=f"be {allowed}", value=channel, fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("train.weight_folder",),
        when=lambda config: config.train.weight_channel not in (WeightChannelName.disk, WeightChannelName.delta),
        why="train.weight_channel is neither disk nor delta",
    ),
    IgnoredKey(
        names=(
            "train.weight_channel",
            "train.weight_folder",
            "train.update_weights_interval",
            "train.update_weight_buffer_size",
        ),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so no engine needs weights",
    ),
)
