"""Checks of everything that a config names and that needs no GPU, before Ray starts: files, packages, user code.

Each check is one function of a resolved config, in `CHECKS`. All problems are reported together, with those of the
config itself. The checks run in tens of milliseconds: packages are searched instead of imported, and only the first
row of a data file is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from rlscale.cluster.cluster_address import cluster_address
from rlscale.config import EngineKind, RunConfig
from rlscale.config.groups.cluster import Device
from rlscale.config.groups.judge import RewardEngineKind
from rlscale.config.groups.sandbox import SandboxKind
from rlscale.config.installed import is_installed
from rlscale.config.passthrough.sglang_python import check_python, check_transfer
from rlscale.config.problems import ALL_KEYS
from rlscale.config.rules import (
    Rule,
    asks_teachers,
    attention_groups,
    has_reward_engines,
    needs_gateway,
    pipeline_stages,
    reward_engine_kind,
    server_groups,
    uses_engines,
    uses_sglang_router,
)
from rlscale.config.rules.each_group import for_each_group
from rlscale.config.rules.low_precision import engine_reads_low_precision
from rlscale.config.user_functions import check_hooks
from rlscale.driver.preflight.agent_checks import check_agent
from rlscale.driver.preflight.buffer_service import check_buffer
from rlscale.driver.preflight.data_files import check_prompts, check_replay
from rlscale.driver.preflight.eval_checks import check_eval_functions, check_eval_sets
from rlscale.driver.preflight.model_sources import (
    check_adapters,
    check_policy,
    check_roles,
    check_start,
    check_trained_parameters,
)
from rlscale.driver.preflight.packages import check_packages
from rlscale.driver.preflight.run_paths import (
    check_disk_space,
    check_output_folders,
    check_run_folder,
    check_temporary_folder,
    check_unfinished_run,
)
from rlscale.driver.preflight.teacher_tokenizer import check_loaded_teacher
from rlscale.driver.warmup import ORIGIN, warmup_config, warmup_is_used
from rlscale.engines.ports import port_fault
from rlscale.engines.scripted.script import load_script
from rlscale.errors import ConfigError, Problem
from rlscale.hosts import LOOPBACK
from rlscale.models.model_path import check_model_path
from rlscale.observe.trackers.check_trackers import check_trackers
from rlscale.plan.placement import build_layout

Check = Callable[[RunConfig], list[Problem]]


def check_logging(config: RunConfig) -> list[Problem]:
    """Problems of trackers: a missing package or login."""
    return check_trackers(config.logging)


def check_sglang(config: RunConfig) -> list[Problem]:
    """Problems of the interpreter of SGLang and its router."""
    has_engines = bool(config.cluster.rollout_num_gpus)
    judges = has_reward_engines(config) and reward_engine_kind(config) == RewardEngineKind.sglang
    generates = has_engines and config.rollout.engine == EngineKind.sglang
    serves = generates or judges
    routes = has_engines and uses_sglang_router(config)
    if not serves and not routes:
        return []
    on_cpu = config.cluster.device == Device.cpu
    found = check_python(config.sglang.python, serves=serves, routes=routes, on_cpu=on_cpu)
    # The rule is repeated: before `cluster.device` was resolved it could be unknown.
    found += engine_reads_low_precision(config) if generates else []
    groups = () if found or config.run.rehearsal else server_groups(config)
    if groups:
        given = config.sglang.server_args
        backends = {({**given, **each.server_args}).get("disaggregation_transfer_backend") for each in groups}
        found += check_transfer(config.sglang.python, backends)
    return found + (check_sizes_on_cpu(config) if generates and on_cpu else [])


@for_each_group
def check_sizes_on_cpu(config: RunConfig) -> list[Problem]:
    """Problems of parallel sizes of SGLang on a CPU.

    With data-parallel attention or experts the server ends at its first request. It pads heads that the ranks do not
    divide with zeros, and then its weights cannot be verified.
    """
    given, problems = config.sglang.server_args, list[Problem]()
    groups = "attn_dp_size" if (given.get("attn_dp_size") or 1) > 1 else "dp_size"
    for name, size in {"ep_size": given.get("ep_size") or 1, groups: attention_groups(config)}.items():
        if size > 1:
            rule, fix = "be 1 with cluster.device=cpu", "remove it; SGLang computes this on GPUs only"
            problems.append(Problem(path=f"sglang.{name}", rule=rule, value=str(size), fix=fix))
    heads, gpus, stages = (
        config.model.num_key_value_heads,
        config.cluster.rollout_num_gpus_per_engine,
        pipeline_stages(config),
    )
    if heads is not None and heads % (gpus // stages):
        times = "" if stages == 1 else f"{stages} times "
        rule = f"be {times}a divisor of model.num_key_value_heads={heads} with cluster.device=cpu"
        fix = f"set it to {math.gcd(heads, gpus // stages) * stages}"
        path = "cluster.rollout_num_gpus_per_engine"
        problems.append(Problem(path=path, rule=rule, value=str(gpus), fix=fix))
    return problems


def check_script(config: RunConfig) -> list[Problem]:
    """Problems of the script of `rollout.script_path`."""
    path = config.rollout.script_path
    if config.rollout.engine != EngineKind.scripted or path is None or not uses_engines(config):
        return []
    try:
        load_script(path)
    except ConfigError as error:
        return list(error.problems)
    return []


def check_external(config: RunConfig) -> list[Problem]:
    """Problems of external engines that do not answer or do not fit the run."""
    addresses = config.rollout.external_engine_addrs
    if config.rollout.engine != EngineKind.external or addresses is None or not uses_engines(config):
        return []
    # Imported here: the HTTP client takes a tenth of a second, and few runs have such engines.
    from rlscale.driver.external_engines import ServerNeeds, check_servers

    return check_servers(addresses, ServerNeeds.of(config), proxy=config.network.http_proxy)


def check_teachers(config: RunConfig) -> list[Problem]:
    """Problems of the servers of teachers that do not answer."""
    if not asks_teachers(config):
        return []
    # Imported here: the HTTP client takes a tenth of a second, and few runs have such teachers.
    from rlscale.driver.open_teachers import find_unusable_servers

    return find_unusable_servers(config)


def check_judge(config: RunConfig) -> list[Problem]:
    """Problems of the model of `reward.engine`. It may be of any architecture: SGLang serves more than the trainer."""
    model = config.reward.engine.hf_checkpoint
    if model is None or not has_reward_engines(config):
        return []
    return check_model_path(model, name="reward.engine.hf_checkpoint")


def check_cluster(config: RunConfig) -> list[Problem]:
    """Problems of the address of a Ray cluster; without one, of the number of GPUs of this machine."""
    cluster = cluster_address(config.cluster.ray_address)
    if cluster is not None:
        # Imported here, and below: they import Ray, which takes a quarter of a second.
        from rlscale.cluster.attach import find_problems

        return find_problems(cluster)
    if config.cluster.device == Device.cpu:
        return []
    from rlscale.cluster.ray_session import check_local_gpus  # as above

    return check_local_gpus(build_layout(config))


def check_sandbox(config: RunConfig) -> list[Problem]:
    """The problem of a sandbox that does not start on this machine."""
    kind = config.sandbox.kind
    if kind is None or config.run.rehearsal or (kind == SandboxKind.docker and not is_installed("docker")):
        return []  # `check_packages` reports a missing package
    if kind == SandboxKind.fusion and config.sandbox.url is None:
        return []  # a rule reports the missing key
    if missing := [path for path in config.sandbox.read_only_folders if not Path(path).is_dir()]:
        path, fix = "sandbox.read_only_folders", "create it, or remove it"
        return [Problem(path=path, rule="name existing folders", value=missing[0], fix=fix)]
    # Imported here: the clients of services take a tenth of a second, and few runs have sandboxes.
    from rlscale.sandboxes.open_sandboxes import find_sandbox_fault

    fault = find_sandbox_fault(config.sandbox)
    if fault is None:
        return []
    fix = "use a machine on which it works, or remove the key"
    rule, value = "name sandboxes that start here", f"{config.sandbox.kind} ({fault})"
    return [Problem(path="sandbox.kind", rule=rule, value=value, fix=fix)]


def check_gateway(config: RunConfig) -> list[Problem]:
    """Problem of the address of the gateway, which starts on this machine."""
    host, port = config.gateway.host or LOOPBACK, config.gateway.port
    if not needs_gateway(config):
        return []
    if (fault := port_fault(host, 0)) is not None:
        rule, fix = "be an address of this machine", "remove it, or write an address that `ip address` shows"
        return [Problem(path="gateway.host", rule=rule, value=f"{host} ({fault})", fix=fix)]
    if port is None or (fault := port_fault(host, port)) is None:
        return []
    rule, fix = f"be a free port of {host}", "choose another port, or remove it for a free one"
    return [Problem(path="gateway.port", rule=rule, value=f"{port} ({fault})", fix=fix)]


def check_warmup(config: RunConfig) -> list[Problem]:
    """Problems of the warm-up of `model.warmup_experiment`, if it has not run yet."""
    if not warmup_is_used(config):
        return []
    try:
        warmup = warmup_config(config)
    except ConfigError as error:
        return list(error.problems)
    if warmup is None or (Path(str(warmup.run.dir)) / "finished.json").exists():
        return []
    origin = ORIGIN.format(config.model.warmup_experiment)
    return [replace(problem, origin=origin) for check in OF_A_WARMUP for problem in check(warmup)]


OF_A_WARMUP: tuple[Check, ...] = (check_packages, check_prompts, check_eval_sets, check_run_folder, check_hooks)
"""Checks of a warm-up, which has the run's model, cluster and engines."""

CHECKS: tuple[Check, ...] = (
    check_packages,
    check_prompts,
    check_eval_sets,
    check_replay,
    check_start,
    check_policy,
    check_roles,
    check_loaded_teacher,
    check_judge,
    check_trained_parameters,
    check_adapters,
    check_run_folder,
    check_unfinished_run,
    check_output_folders,
    check_disk_space,
    check_logging,
    check_sglang,
    check_external,
    check_teachers,
    check_script,
    check_buffer,
    check_sandbox,
    check_gateway,
    check_temporary_folder,
    check_cluster,
    check_warmup,
    check_hooks,
    check_agent,
    check_eval_functions,
)
"""All checks, in the order in which their problems are reported."""

OF_WHOLE_CONFIGS: tuple[Check, ...] = (check_eval_sets, check_eval_functions, check_unfinished_run, check_warmup)
"""Checks that copy or write whole groups, so that the keys that they depend on cannot be recorded."""


def check_run(config: RunConfig, broken: Collection[str] = ()) -> list[Problem]:
    """All problems of what a config names, each once.

    Args:
        config: resolved. It may break rules; what it names is checked all the same.
        broken: keys and groups that are wrong by themselves and have a default in `config` instead. A check that reads
            one of them is skipped.
    """
    if ALL_KEYS in broken:
        return []
    found: dict[tuple[str, str, str], Problem] = {}
    for check in CHECKS:
        for problem in check(config) if not broken else _find_independent(check, config, broken):
            # The warm-up, which comes last, may have a problem of the run.
            found.setdefault((problem.path, problem.rule, problem.value), problem)
    return list(found.values())


def _find_independent(check: Check, config: RunConfig, broken: Collection[str]) -> list[Problem]:
    """The problems of a check, unless it reads a broken key."""
    if check in OF_WHOLE_CONFIGS:
        return []
    problems, read = Rule(check).trace(config)
    prefixes = tuple(f"{name}." for name in broken)
    is_dependent = any(
        f"{key}.".startswith(prefix) or prefix.startswith(f"{key}.") for key in read for prefix in prefixes
    )
    return [] if is_dependent else problems
