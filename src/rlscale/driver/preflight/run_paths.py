"""Checks of the folders that a run writes, and of the space on their disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from rlscale.checkpoint.run_folder import RunFolder, unwritable
from rlscale.cluster.cluster_address import cluster_address
from rlscale.config import RunConfig, to_yaml
from rlscale.errors import ConfigError, Problem
from rlscale.models.resolve_model import cache_root
from rlscale.plan.checkpoint_size import checkpoint_size
from rlscale.plan.model_size import list_architectures, policy_architecture
from rlscale.secrets import redact_yaml

MAX_SOCKET_PATH = 107
"""Limit of Linux for the path of a socket, in bytes."""

LONGEST_SOCKET = "/ray/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store.9"
"""Socket in the temporary folder of Ray: the time of the start and the id of the process, at their longest."""


def check_run_folder(config: RunConfig) -> list[Problem]:
    """Problems of `run.dir`: it cannot be written, or another process uses it."""
    assert config.run.dir is not None, "set by the resolve step"
    return RunFolder.check(Path(config.run.dir))


def check_unfinished_run(config: RunConfig) -> list[Problem]:
    """Problem of a `run.dir` with an unfinished run of another config, or with a damaged one."""
    assert config.run.dir is not None, "set by the resolve step"
    return RunFolder.check_config(
        Path(config.run.dir), lambda: redact_yaml(to_yaml(config)), resume_changed=config.run.resume_changed
    )


def check_output_folders(config: RunConfig) -> list[Problem]:
    """Problems of further folders that cannot be written."""
    debug, checkpoint, wandb = config.debug, config.checkpoint, config.logging.wandb
    folders = {
        "checkpoint.save": checkpoint.save,
        "critic.save": config.critic.save,
        "debug.dump_details": debug.dump_details,
        "debug.profile_dir": debug.profile_dir if debug.profile_rollouts is not None else None,
        # The default, the working folder, is written only if memory runs out: it may be read-only.
        "debug.memory_snapshot_dir": debug.memory_snapshot_dir if debug.memory_snapshot_dir != "." else None,
        "logging.wandb.dir": wandb.dir if wandb.enabled else None,
        "logging.tensorboard.dir": config.logging.tensorboard.dir if config.logging.tensorboard.enabled else None,
    }
    # Templates of files: their folder up to the first part that a rollout determines.
    templates = {
        "checkpoint.save_hf": checkpoint.save_hf,
        "debug.save_rollout_data": debug.save_rollout_data,
        "debug.save_train_data": debug.save_train_data,
    }
    paths = {key: Path(os.path.expanduser(folder)) for key, folder in folders.items() if folder is not None}
    paths |= {key: Path(given.split("{")[0] + "x").parent for key, given in templates.items() if given is not None}
    if config.model.build is not None or config.model.warmup_experiment is not None:
        paths["model.cache_dir"] = cache_root(config.model.cache_dir)
    inside = None if config.run.dir is None else Path(config.run.dir).absolute()
    # Below the run folder a problem would be reported twice.
    return [
        problem
        for key, path in paths.items()
        if inside not in path.absolute().parents and (problem := unwritable(key, path)) is not None
    ]


def check_disk_space(config: RunConfig) -> list[Problem]:
    """Problems of disks that do not have room for one checkpoint and the final export, as `rlscale-plan` counts them.

    Only where the model's size is known: less space than this always ends in a failure.
    """
    try:
        size = checkpoint_size(config, list_architectures(config, policy_architecture(config.model)))
    except (ConfigError, re.error):  # a rule of the config reports a wrong pattern of parameters
        return []
    if size is None:
        return []
    assert config.checkpoint.save is not None, "there is a size"
    fix = "choose a folder on another disk, or set checkpoint.save_final=false checkpoint.save_interval=null"
    # A critic has its own folder only if that is set.
    own = size.critic if config.critic.save is not None else 0
    contents = "one checkpoint and the export" if size.export else "one checkpoint"
    needs = [("checkpoint.save", config.checkpoint.save, size.total + size.export - own, contents)]
    if own and config.critic.save is not None:
        needs.append(("critic.save", config.critic.save, own, "one checkpoint of the critic"))
    found = [(*need, _free_bytes(need[1])) for need in needs]
    return [
        Problem(
            path=path,
            rule=f"be on a disk with {_show_size(needed)} free, for {contents}",
            value=f"{folder} with {_show_size(free)}",
            fix=fix,
        )
        for path, folder, needed, contents, free in found
        if free < needed
    ]


def _free_bytes(given: str) -> int:
    """Free bytes of the disk of a folder, which may not exist yet."""
    folder = Path(os.path.expanduser(given)).absolute()
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def check_temporary_folder(config: RunConfig) -> list[Problem]:
    """Problem of a folder whose path is too long for the sockets of a Ray that starts here, as on some clusters."""
    if sys.platform != "linux" or cluster_address(config.cluster.ray_address) is not None:
        return []
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    limit = MAX_SOCKET_PATH - len(LONGEST_SOCKET)
    if variable is None or len(os.fsencode(os.environ[variable])) <= limit:
        return []
    rule = f"be at most {limit} characters long, because Ray creates sockets below it"
    fix = "set RAY_TMPDIR to a shorter path, e.g. RAY_TMPDIR=/tmp"
    return [Problem(path=variable, rule=rule, value=os.environ[variable], fix=fix)]


def _show_size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
