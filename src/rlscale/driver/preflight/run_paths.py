"""Checks of the folders that a run writes, and of the space on their disk."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rlscale.architectures.architecture import REQUIRED_FIELDS, Architecture
from rlscale.architectures.hf_config import architecture_fields
from rlscale.checkpoint.run_folder import RunFolder, unwritable
from rlscale.cluster.cluster_address import cluster_address
from rlscale.config import OptimizerName, RunConfig, TrainBackendName, to_yaml
from rlscale.errors import Problem
from rlscale.models.resolve_model import cache_root
from rlscale.secrets import redact_yaml

EXPORT_BYTES = 2
"""Bytes of a parameter in an export, at least."""

WEIGHT_BYTES, MOMENT_BYTES = 4, 8
"""Bytes of a parameter in a checkpoint: its float32 value, and the two moments of Adam."""

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
    debug, checkpoint = config.debug, config.checkpoint
    folders = {
        "checkpoint.save": checkpoint.save,
        "critic.save": config.critic.save,
        "debug.dump_details": debug.dump_details,
        "debug.profile_dir": debug.profile_dir if debug.profile_rollouts is not None else None,
        "logging.tensorboard.dir": config.logging.tensorboard.dir if config.logging.tensorboard.enabled else None,
    }
    # Templates of files: their folder up to the first part that a rollout determines.
    templates = {
        "checkpoint.save_hf": checkpoint.save_hf,
        "debug.save_rollout_data": debug.save_rollout_data,
        "debug.save_train_data": debug.save_train_data,
    }
    paths = {key: Path(folder).expanduser() for key, folder in folders.items() if folder is not None}
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
    """Problem of a disk that does not have room for one checkpoint and the final export.

    Only of the policy, and only where the model's size is known: less space than this always ends in a failure.
    """
    checkpoint, model = config.checkpoint, config.model
    saves = checkpoint.save_final or checkpoint.save_interval is not None
    if config.debug.rollout_only or not saves or checkpoint.save is None:
        return []
    given = {name: getattr(model, name) for name in REQUIRED_FIELDS}
    fields = architecture_fields(given, build=model.build, hf_checkpoint=model.hf_checkpoint)
    if any(name not in fields for name in REQUIRED_FIELDS):
        return []
    folder = Path(checkpoint.save).expanduser().absolute()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    needed, free = (
        Architecture.from_fields(fields).parameters * _bytes_per_parameter(config),
        shutil.disk_usage(above).free,
    )
    if free >= needed:
        return []
    return [
        Problem(
            path="checkpoint.save",
            rule=f"be on a disk with {_show_size(needed)} free, for one checkpoint and the export",
            value=f"{checkpoint.save} with {_show_size(free)}",
            fix="choose a folder on another disk, or set checkpoint.save_final=false checkpoint.save_interval=null",
        )
    ]


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


def _bytes_per_parameter(config: RunConfig) -> int:
    """Bytes that a run certainly writes for each parameter of the policy."""
    train = config.train
    export = EXPORT_BYTES if config.checkpoint.save_final else 0
    if train.lora.rank:  # a checkpoint has adapters only
        return export
    has_moments = train.backend == TrainBackendName.fsdp and config.optim.name != OptimizerName.muon
    is_whole = train.only_train_params is None and train.freeze_params is None
    return export + WEIGHT_BYTES + (MOMENT_BYTES if has_moments and is_whole else 0)
