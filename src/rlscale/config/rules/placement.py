"""Rules about nodes, GPUs and offloading."""

from __future__ import annotations

from rlscale.config.addresses import advise_address, is_address
from rlscale.config.groups.cluster import Device, OffloadMode
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import WeightChannelName
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    is_sft,
    num_gpus_per_node,
    num_trainer_ranks,
    offloads_engines,
    offloads_trainer,
    overlaps,
    server_groups,
    uses_engines,
    uses_external_engines,
    uses_router,
)
from rlscale.config.rules.each_group import for_each_group
from rlscale.config.rules.parallel import divisors
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_RAY_NAMES = ("auto", "local")
_RAY_CLIENT, _RAY_CLIENT_PORT = "ray://", 10001  # the port may be omitted
_RAY_EXAMPLE = "10.0.0.1:6379"


@rule
def ray_address_has_a_port(config: RunConfig) -> list[Problem]:
    address = config.cluster.ray_address
    if address is None or address in _RAY_NAMES or _is_client_url(address):
        return []
    # A URL of Ray names its dashboard or its clients' server, which have other ports.
    advice = f"write e.g. {_RAY_EXAMPLE}" if "://" in address else advise_address(address, example=_RAY_EXAMPLE)
    if advice is None:
        return []
    rule, fix = "be auto, local or <host>:<port>", f"{advice}, or remove it to start Ray here"
    return [Problem(path="cluster.ray_address", rule=rule, value=address, fix=fix)]


def _is_client_url(address: str) -> bool:
    """Whether an address is one of a server for Ray's clients."""
    place = address.removeprefix(_RAY_CLIENT)
    return place != address and (is_address(place) or is_address(f"{place}:{_RAY_CLIENT_PORT}"))


@rule
def trainer_fits_a_node(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    if cluster.actor_num_gpus_per_node <= cluster.num_gpus_per_node:
        return []
    rule = f"be at most cluster.num_gpus_per_node={cluster.num_gpus_per_node}"
    value = show(cluster.actor_num_gpus_per_node)
    fix = "set cluster.num_gpus_per_node to the GPUs of a node"
    return [Problem(path="cluster.actor_num_gpus_per_node", rule=rule, value=value, fix=fix)]


@rule
def further_engines_can_join(config: RunConfig) -> list[Problem]:
    """Engines that join and leave are restarted by the recovery, and reached over the network."""
    cluster, path = config.cluster, "cluster.rollout_max_num_gpus"
    number, size = cluster.rollout_max_num_gpus, cluster.rollout_num_gpus_per_engine
    # Another rule refuses it for prefill and decode servers, which need the router.
    if number is None or uses_external_engines(config) or not uses_engines(config) or server_groups(config):
        return []
    value, found = show(number), list[Problem]()
    fixed = cluster.rollout_num_gpus or 0
    if number < fixed or number % size:
        rule = (
            f"be at least cluster.rollout_num_gpus={fixed} and a multiple of cluster.rollout_num_gpus_per_engine={size}"
        )
        fix = f"set it to {max(fixed, number - number % size) or size}"
        found.append(Problem(path=path, rule=rule, value=value, fix=fix))
    if not config.fault_tolerance.enabled:
        fix = "set fault_tolerance.enabled=true"
        found.append(Problem(path=path, rule="be null without fault_tolerance.enabled", value=value, fix=fix))
    if cluster.colocate:
        fix = "remove it, or set cluster.colocate=false"
        found.append(Problem(path=path, rule="be null with cluster.colocate", value=value, fix=fix))
    if config.router.enabled or uses_router(config):
        fix = "set router.enabled=false"
        found.append(Problem(path=path, rule="be null with a router, whose engines are fixed", value=value, fix=fix))
    if config.train.weight_channel == WeightChannelName.shared_memory:
        fix = "use train.weight_channel=process_group"
        found.append(Problem(path=path, rule="be null with train.weight_channel=shared_memory", value=value, fix=fix))
    return found


@rule
def offload_covers_both(config: RunConfig) -> list[Problem]:
    """`cluster.offload` sets the keys of trainer and engines."""
    cluster = config.cluster
    rule, fix = "not be false with cluster.offload", "keep one of them"
    return [
        Problem(path=f"cluster.{name}", rule=rule, value="false", fix=fix)
        for name in ("offload_train", "offload_rollout")
        if cluster.offload and getattr(cluster, name) is False
    ]


@rule
@for_each_group
def engines_fit_nodes(config: RunConfig) -> list[Problem]:
    """An engine uses a part of one node, or several whole nodes."""
    cluster = config.cluster
    size, node = cluster.rollout_num_gpus_per_engine, num_gpus_per_node(config)
    total = cluster.rollout_num_gpus or size
    # An engine above the size of a node needs whole nodes. A smaller one must divide a node, unless one node is enough.
    fits = size % node == 0 if size > node else total <= node or node % size == 0
    if fits or not uses_engines(config) or config.rollout.engine != EngineKind.sglang:
        return []
    smaller = max(number for number in divisors(node) if number <= size)
    # The nearest sizes that fit: a divisor of a node, and whole nodes rounded up.
    near = (smaller, -(-size // node) * node)
    rule = f"divide cluster.num_gpus_per_node={node}, or be a multiple of it"
    fix = f"set it to {' or '.join(map(str, near))}"
    return [Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(size), fix=fix)]


@rule
def engines_have_gpus(config: RunConfig) -> list[Problem]:
    """External engines bring their own GPUs."""
    number = config.cluster.rollout_num_gpus
    if uses_external_engines(config):
        return []
    if not uses_engines(config) or number or (number is None and config.cluster.colocate):
        return []
    fix = "set it, e.g. cluster.rollout_num_gpus=1, or share the GPUs of the trainer with cluster.colocate=true"
    return [Problem(path="cluster.rollout_num_gpus", rule="be at least 1", value=show(number), fix=fix)]


@rule
def offloaded_engines_are_synchronous(config: RunConfig) -> list[Problem]:
    """An engine without its memory does not generate, so it cannot generate ahead of training."""
    # With cluster.colocate the rule `colocated_engines_are_synchronous` reports the problem.
    if not offloads_engines(config) or config.cluster.colocate:
        return []
    rule = "be 0 with cluster.offload_rollout"
    # cluster.offload sets both keys, so that one of them cannot be false.
    cause = "offload" if config.cluster.offload else "offload_rollout"
    fix = f"set it to 0, or cluster.{cause}=false; offloaded engines cannot generate ahead"
    staleness = config.rollout.max_staleness
    return [Problem(path="rollout.max_staleness", rule=rule, value=show(staleness), fix=fix)] if staleness else []


@rule
def offloaded_engines_get_full_weights(config: RunConfig) -> list[Problem]:
    if not offloads_engines(config) or config.train.weight_channel != WeightChannelName.delta:
        return []
    rule = "be process_group, shared_memory or disk with cluster.offload_rollout"
    fix = "set cluster.offload_rollout=false; an offloaded engine has no weights to apply changes to"
    return [Problem(path="train.weight_channel", rule=rule, value="delta", fix=fix)]


@rule
def colocated_engines_are_synchronous(config: RunConfig) -> list[Problem]:
    staleness = config.rollout.max_staleness
    if not config.cluster.colocate or staleness == 0 or is_sft(config):
        return []
    fix = (
        "set rollout.max_staleness=0, or cluster.colocate=false with separate GPUs (cluster.rollout_num_gpus); "
        "engines that share GPUs with the trainer cannot generate ahead"
    )
    return [Problem(path="rollout.max_staleness", rule="be 0 with cluster.colocate", value=show(staleness), fix=fix)]


@rule
def engine_size_divides_gpus(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    size, number = cluster.rollout_num_gpus_per_engine, cluster.rollout_num_gpus
    if number is None and cluster.colocate:
        number = num_trainer_ranks(config)
    problems = list[Problem]()
    if config.rollout.engine in (EngineKind.embedded, EngineKind.scripted) and size != 1:
        rule = f"be 1 with rollout.engine={config.rollout.engine}"
        fix = f"set it to 1, or choose rollout=sglang; the {config.rollout.engine} engine runs on one GPU"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(size), fix=fix))
    # The sizes of groups are those of their engines, which another rule checks.
    if number is not None and number % size and not server_groups(config):
        rule = f"divide the {number} GPUs of all engines"
        fix = f"set it to 1, or cluster.rollout_num_gpus={number // size * size + size}"
        problems.append(Problem(path="cluster.rollout_num_gpus_per_engine", rule=rule, value=show(size), fix=fix))
    return problems


@rule
@for_each_group
def pipeline_stages_divide_engines(config: RunConfig) -> list[Problem]:
    """Each pipeline stage of an SGLang engine has as many GPUs."""
    stages, size = config.sglang.server_args.get("pp_size", 1), config.cluster.rollout_num_gpus_per_engine
    if config.rollout.engine != EngineKind.sglang or (stages > 0 and size % stages == 0):
        return []
    rule = f"be a positive divisor of cluster.rollout_num_gpus_per_engine={size}"
    # The largest divisor of the GPUs that is not above the number of stages.
    nearest = max(number for number in divisors(size) if number <= max(stages, 1))
    return [Problem(path="sglang.pp_size", rule=rule, value=show(stages), fix=f"set it to {nearest}")]


def _saves_memory(config: RunConfig) -> bool:
    """Whether torch_memory_saver offloads the trainer; without CUDA the tensors are moved instead."""
    return config.cluster.offload_train_mode == OffloadMode.tms and config.cluster.device != Device.cpu


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=(
            "cluster.colocate",
            "cluster.offload",
            "cluster.offload_rollout",
            "cluster.offload_train",
            "cluster.rollout_num_gpus",
            "cluster.rollout_num_gpus_per_engine",
        ),
        when=lambda config: not uses_engines(config),
        why="the run does not generate, so there are no engines",
    ),
    IgnoredKey(
        names=("cluster.spin_threads",),
        when=lambda config: config.cluster.device == Device.cuda,
        why="cluster.device is cuda",
    ),
    IgnoredKey(
        names=("cluster.spin_threads",),
        when=overlaps,
        why="rollout.max_staleness is above 0, so trainer and engines work at the same time and share the cores",
    ),
    IgnoredKey(
        names=("cluster.offload_train_mode", "train.memory_margin_bytes", "train.weights_backuper"),
        when=lambda config: not offloads_trainer(config),
        why="the trainer is not offloaded",
    ),
    IgnoredKey(
        names=("train.weights_backuper",),
        when=lambda config: _saves_memory(config) and config.cluster.device == Device.cuda,
        why="torch_memory_saver keeps the copies (cluster.offload_train_mode=tms)",
    ),
    IgnoredKey(
        names=("train.memory_margin_bytes",),
        when=lambda config: not _saves_memory(config),
        why="cluster.offload_train_mode is not tms, or there is no CUDA",
    ),
    IgnoredKey(
        names=(
            "cluster.rollout_max_num_gpus",
            "cluster.rollout_num_gpus",
            "cluster.rollout_num_gpus_per_engine",
        ),
        when=uses_external_engines,
        why="the run does not place or restart external engines",
    ),
)
