"""Comparison of the nodes of a run, after their placement and before the first model is loaded."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlscale.cluster.node_probe import ProbeRequest, list_files, probe_nodes
from rlscale.cluster.ray_session import Bundles, driver_node
from rlscale.config import Device, EngineKind, RunConfig, WeightChannelName
from rlscale.config.rules import needs_gateway, uses_engines
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import ConfigError, Problem
from rlscale.models.resolve_model import cache_root
from rlscale.plan.node_comparison import find_problems, find_warnings
from rlscale.plan.node_facts import PRESENT, CheckedFolder, FixedPort, FolderUse, node_table, token_file

FILE_CHANNELS = (WeightChannelName.disk, WeightChannelName.delta)


def check_nodes(
    prepared: PreparedRun,
    bundles: Bundles,
    *,
    run_folder: Path,
    report: Callable[[str], None],
    warn: Callable[[str], None],
    running_on: Collection[str] = (),
) -> None:
    """Prints a table of the nodes of the run, and warnings; a run on one node does nothing here.

    Args:
        running_on: Ray's ids of nodes on which processes of this run already use their ports.

    Raises:
        ConfigError: the nodes cannot run this config together; every problem names its node.
    """
    check_channel(prepared, bundles)
    if bundles.num_nodes == 1:
        return
    config = prepared.config
    with _token_files(checked_folders(prepared, run_folder=run_folder)) as folders:
        request = ProbeRequest(
            folders=tuple(folders),
            run_folder=run_folder,
            env_vars=config.train.env_vars,
            sglang_python=config.sglang.python,
            needs_sglang=_has_sglang(config),
        )
        ports = {node: fixed_ports(config, bundles, node) for node in bundles.node_ids if node not in running_on}
        nodes = probe_nodes(bundles.node_ids, request, ports)
    for line in node_table(nodes, folders):
        report(line)
    for warning in find_warnings(nodes):
        warn(warning)
    if problems := find_problems(nodes, folders):
        raise ConfigError(problems)


def check_channel(prepared: PreparedRun, bundles: Bundles) -> None:
    """Raises ConfigError where trainers and engines would share memory across nodes."""
    config, channel = prepared.config, prepared.config.train.weight_channel
    # On GPUs an engine opens the memory of a trainer rank on the same GPU, so that nodes do not matter.
    within_node = channel == WeightChannelName.shared_memory and config.cluster.device == Device.cpu
    # Bundles from `first_critic` on are a critic's: it sends no weights, so that it may be on another node.
    num_nodes = bundles.count_nodes(prepared.layout.first_critic)
    if not within_node or num_nodes == 1 or not prepared.layout.num_engines:
        return
    rule = f"not be shared_memory, because Ray placed trainer and engines on {num_nodes} nodes"
    fix = "use train.weight_channel=process_group, or disk or delta with a shared train.weight_folder"
    raise ConfigError([Problem(path="train.weight_channel", rule=rule, value=str(channel), fix=fix)])


def checked_folders(prepared: PreparedRun, *, run_folder: Path) -> list[CheckedFolder]:
    """The folders and files that every node of the run needs. Only the driver reads the data."""
    config = prepared.config
    outputs = {"run.dir": run_folder, "checkpoint.save": _path(config.checkpoint.save)}
    if uses_engines(config) and config.train.weight_channel in FILE_CHANNELS:
        outputs["train.weight_folder"] = _path(config.train.weight_folder)
    outputs["critic.save"] = _path(config.critic.save)
    if config.checkpoint.save_hf is not None:
        # A template of files: its folder up to the part that the number of the rollout determines.
        outputs["checkpoint.save_hf"] = _path(str(Path(config.checkpoint.save_hf.split("{")[0] + "x").parent))
    inputs = {_model_key(prepared): _path(prepared.model_path)}
    inputs |= {key: _path(value) for key, value in _given_inputs(config)}
    shared = [
        CheckedFolder(key=key, path=path, use=FolderUse.shared, expected=secrets.token_hex(8))
        for key, path in outputs.items()
        if path is not None
    ]
    same = [
        CheckedFolder(key=key, path=path, use=FolderUse.same, expected=files)
        for key, path in inputs.items()
        # A hub id has no folder: each node downloads the model.
        if path is not None and (files := list_files(path)) is not None
    ]
    return [*shared, *same, *_sglang_paths(config)]


def _sglang_paths(config: RunConfig) -> list[CheckedFolder]:
    """The interpreter of SGLang, and files and folders that its arguments name."""
    if not _has_sglang(config):
        return []
    given = {f"sglang.{name}": Path(value) for name, value in config.sglang.server_args.items() if _is_path(value)}
    found = [
        CheckedFolder(key=key, path=path, use=FolderUse.same, expected=files)
        for key, path in given.items()
        if (files := list_files(path)) is not None
    ]
    if (python := _path(config.sglang.python)) is not None:
        found.append(CheckedFolder(key="sglang.python", path=python, use=FolderUse.present, expected=PRESENT))
    return found


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _has_sglang(config: RunConfig) -> bool:
    return uses_engines(config) and config.rollout.engine == EngineKind.sglang


def fixed_ports(config: RunConfig, bundles: Bundles, node: str) -> tuple[FixedPort, ...]:
    """The ports of a node that the config names; rlscale chooses all others among those that are free."""
    found = []
    if node == driver_node() and config.gateway.port is not None and needs_gateway(config):
        found.append(FixedPort(key="gateway.port", port=config.gateway.port, host=config.gateway.host))
    if node in bundles.engine_nodes and _has_sglang(config):
        found += [
            FixedPort(key=f"sglang.{name}", port=value)
            for name, value in config.sglang.server_args.items()
            if name.endswith("_port") and isinstance(value, int) and value > 0
        ]
    return tuple(found)


def _given_inputs(config: RunConfig) -> Iterator[tuple[str, str | None]]:
    yield "checkpoint.load", config.checkpoint.load
    yield "model.ref_load", config.model.ref_load
    yield "model.teacher_load", config.model.teacher_load
    yield "critic.load", config.critic.load


def _model_key(prepared: PreparedRun) -> str:
    """The key that decides where the model is: it may have been built, or trained by the warm-up, into the cache."""
    model = prepared.config.model
    is_cached = cache_root(model.cache_dir) in Path(prepared.model_path).resolve().parents
    return "model.cache_dir" if is_cached or model.hf_checkpoint is None else "model.hf_checkpoint"


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(os.path.expanduser(text)).absolute()


@contextmanager
def _token_files(folders: Sequence[CheckedFolder]) -> Iterator[Sequence[CheckedFolder]]:
    """Writes a file into each shared folder, which the other nodes must see."""
    shared = [folder for folder in folders if folder.use == FolderUse.shared]
    try:
        for folder in shared:
            folder.path.mkdir(parents=True, exist_ok=True)
            token_file(folder).write_text(folder.expected, encoding="utf-8")
        yield folders
    finally:
        for folder in shared:
            token_file(folder).unlink(missing_ok=True)
