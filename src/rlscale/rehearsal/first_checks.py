"""Checks of the uncut run before its rehearsal: what would stop the real launch stops the rehearsal, too."""

from __future__ import annotations

import os
from pathlib import Path

from rlscale.config import EngineKind, RunConfig
from rlscale.config.rules import uses_engines
from rlscale.data.data_paths import SUFFIXES, resolve_data_path
from rlscale.driver.preflight import CHECKS, check_cluster, check_sglang, check_warmup
from rlscale.driver.preflight.data_files import FILE_EXISTS, check_prompts, wrong_suffix
from rlscale.driver.preflight.eval_checks import check_eval_sets
from rlscale.driver.preflight.run_paths import check_disk_space
from rlscale.errors import ConfigError, Problem
from rlscale.rehearsal.rehearsal_report import Row

NOT_NEEDED = frozenset(
    {
        "sglang.python",
        "rollout.engine",
        "router.enabled",
        "cluster.offload_train_mode",
        "fsdp.attn_implementation",
        "sglang.ep_size",
        "sglang.dp_size",
        "sglang.attn_dp_size",
        "cluster.rollout_num_gpus_per_engine",
        "sglang.server_groups.prefill.num_gpus_per_engine",
        "sglang.server_groups.decode.num_gpus_per_engine",
        "sglang.disaggregation_transfer_backend",
    }
)
"""Keys whose packages a rehearsal does not use: SGLang and its limits on a CPU, torch_memory_saver, flash attention."""

DATA_KEYS = ("data.prompt_data", "data.prompt_files", "eval.prompt_data", "eval.config")
MODEL_KEYS = ("model.hf_checkpoint", "model.ref_load", "model.teacher_load", "critic.load", "checkpoint.load")


OF_THE_CLUSTER = (check_cluster, check_disk_space, check_sglang, check_warmup)
"""Checks of what the machines of the real run have, and of a warm-up, which a rehearsal does not run."""


def check_launch(config: RunConfig) -> tuple[Row, ...]:
    """Checks files, packages and functions of the run; returns its missing checkpoints, which are generated.

    Raises:
        ConfigError: the run would not start, for another reason than a missing data set or checkpoint.
    """
    problems = find_launch_problems(config)
    if problems:
        raise ConfigError(problems)
    missing: dict[str, str] = {}
    for problem in _all_problems(config):
        if _is_missing_model(problem):
            missing[f"{problem.path}={problem.value}"] = "the random model"
    checkpoint = config.model.hf_checkpoint
    if checkpoint is not None and not Path(os.path.expanduser(checkpoint)).exists():
        missing[f"model.hf_checkpoint={checkpoint}"] = "the random model"
    return tuple(missing.items())


def find_launch_problems(config: RunConfig) -> list[Problem]:
    """Problems of the run that its rehearsal does not replace."""
    found = [each for each in _all_problems(config) if not _is_missing_model(each) and not _is_replaced(each)]
    return _check_engines(config) + _check_formats(config) + found


def _all_problems(config: RunConfig) -> list[Problem]:
    return [problem for check in CHECKS if check not in OF_THE_CLUSTER for problem in check(config)]


def _is_missing_model(problem: Problem) -> bool:
    """Whether a checkpoint is not on this machine; one that exists and is broken is a problem."""
    return problem.path in MODEL_KEYS and not Path(os.path.expanduser(problem.value.strip("'"))).exists()


def _is_replaced(problem: Problem) -> bool:
    """Whether the rehearsal generates the file, or does not need the package."""
    return problem.path in NOT_NEEDED or (problem.path in DATA_KEYS and problem.rule == FILE_EXISTS)


def _check_formats(config: RunConfig) -> list[Problem]:
    """Problems of missing data files in a format that the run does not read, so that they are not generated in it."""
    missing = [each for each in check_prompts(config) + check_eval_sets(config) if each.rule == FILE_EXISTS]
    if config.data.data_source_path is not None:  # it reads the prompts in its way
        missing = [each for each in missing if each.path != "data.prompt_data"]
    return [
        wrong_suffix(each.path, each.value)
        for each in missing
        if not resolve_data_path(each.value).name.endswith(SUFFIXES)
    ]


def _check_engines(config: RunConfig) -> list[Problem]:
    if config.rollout.engine != EngineKind.external or not uses_engines(config):
        return []
    rule, fix = "be sglang or embedded with run.rehearsal", "start the rehearsal with rollout.engine=sglang"
    return [Problem(path="rollout.engine", rule=rule, value="external", fix=fix)]
