"""Checks of files, packages and imports that a config names, before Ray is started."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rlscale.checkpoint.store import CheckpointStore
from rlscale.cluster.memory_saver_env import SAVER
from rlscale.config import (
    Device,
    EngineKind,
    ModelConfig,
    OffloadMode,
    RunConfig,
    TrainBackendName,
    mixes_caches,
    uses_critic,
    uses_teacher,
)
from rlscale.config.groups.model import MegatronToHf
from rlscale.config.passthrough.sglang_python import check_python
from rlscale.config.resolve.eval_sets import eval_sets
from rlscale.config.rules import uses_engines
from rlscale.config.user_functions import check_hooks
from rlscale.data.data_paths import resolve_data_path
from rlscale.driver.external_engines import check_servers
from rlscale.driver.trainer_spec import is_bare_weights, is_checkpoint
from rlscale.errors import ConfigError, Problem
from rlscale.models.resolve_model import is_hf_folder, resolve_model
from rlscale.observe.trackers import check_trackers


def check_files(config: RunConfig) -> list[Problem]:
    """Problems of missing data files, checkpoint folders, packages and user functions."""
    problems: list[Problem] = []
    if config.data.rollout_global_dataset:
        problems += _check_data("data.prompt_data", config.data.prompt_data)
    problems += _check_eval_sets(config)
    problems += _check_replay(config)
    problems += _check_start(config)
    problems += _check_roles(config)
    if config.model.build is None:
        problems += _check_model("model.hf_checkpoint", config.model, config.model.hf_checkpoint)
    problems += check_trackers(config.logging)
    problems += _check_sglang(config)
    problems += _check_bridge(config)
    problems += _check_external(config)
    return problems + check_hooks(config)


def _check_roles(config: RunConfig) -> list[Problem]:
    """Problems of reference, teacher and critic, and of the memory saver."""
    step, backend = config.model.ref_ckpt_step, config.train.backend
    problems = _check_source("model.ref_load", config.model, config.model.ref_load, backend=backend, rollout_id=step)
    if uses_teacher(config.algo):  # of any architecture: the policy's fields do not apply
        problems += _check_source("model.teacher_load", ModelConfig(), config.model.teacher_load, backend=backend)
    if uses_critic(config.algo):
        problems += _check_source("critic.load", config.model, config.critic.load, backend=backend)
    return problems + _check_saver(config)


def _check_source(
    key: str,
    model: ModelConfig,
    path: str | None,
    *,
    backend: TrainBackendName,
    rollout_id: int | None = None,
) -> list[Problem]:
    """Problems of a Hugging Face folder or hub id, or of checkpoints of a trainer."""
    if path is None or not is_checkpoint(path):
        return _check_model(key, model, path)
    if is_bare_weights(path):
        return _check_bare_weights(key, path, backend)
    try:
        CheckpointStore.resolve(path, key=key, rollout_id=rollout_id)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_saver(config: RunConfig) -> list[Problem]:
    cluster = config.cluster
    if not cluster.offload_train or cluster.offload_train_mode != OffloadMode.tms or find_spec(SAVER) is not None:
        return []
    fix = f"install it (pip install {SAVER}), or set it to move"
    rule = f"be move without {SAVER}"
    return [Problem(path="cluster.offload_train_mode", rule=rule, value="tms", fix=fix)]


def _check_eval_sets(config: RunConfig) -> list[Problem]:
    if config.eval.interval is None or not uses_engines(config):
        return []
    key = "eval.prompt_data" if config.eval.config is None else "eval.config"
    return [problem for each in eval_sets(config.eval) for problem in _check_data(key, each.path)]


def _check_replay(config: RunConfig) -> list[Problem]:
    """Problems of the files of all rollouts, as far as their number is known."""
    template, key = config.debug.load_rollout_data, "debug.load_rollout_data"
    if template is None:
        return []
    # With data.num_epoch the number of rollouts is unknown here; then the first file is checked.
    rollouts = range(config.data.start_rollout_id or 0, config.data.num_rollout or 1)
    missing = [path for i in rollouts if not Path(path := template.replace("{rollout_id}", str(i))).is_file()]
    if not missing:
        return []
    fix = "lower data.num_rollout to the number of saved rollouts, or check the path"
    return [Problem(path=key, rule="name files that exist for every rollout", value=missing[0], fix=fix)]


def _check_sglang(config: RunConfig) -> list[Problem]:
    has_engines = bool(config.cluster.rollout_num_gpus)
    serves = has_engines and config.rollout.engine == EngineKind.sglang
    routes = has_engines and bool(config.router.enabled)
    if not serves and not routes:
        return []
    on_cpu = config.cluster.device == Device.cpu
    return check_python(config.sglang.python, serves=serves, routes=routes, on_cpu=on_cpu)


def _check_bridge(config: RunConfig) -> list[Problem]:
    uses_bridge = config.model.megatron_to_hf_mode == MegatronToHf.bridge
    if not uses_bridge or config.train.backend != TrainBackendName.megatron or find_spec("mbridge") is not None:
        return []
    fix = "pip install 'rlscale[bridge]', or remove it"
    return [Problem(path="model.megatron_to_hf_mode", rule="be raw without mbridge", value="bridge", fix=fix)]


def _check_external(config: RunConfig) -> list[Problem]:
    """Problems of external engines that do not answer or do not fit the run."""
    addresses = config.rollout.external_engine_addrs
    if config.rollout.engine != EngineKind.external or addresses is None or not uses_engines(config):
        return []
    return check_servers(addresses, mixes_caches=mixes_caches(config.rollout))


def _check_data(key: str, path: str | None) -> list[Problem]:
    if path is None:
        return []
    file = resolve_data_path(path)
    if file.is_file():
        return []
    return [Problem(path=key, rule="name a file that exists", value=path, fix=f"looked for {file.absolute()}")]


def _check_start(config: RunConfig) -> list[Problem]:
    """Problems of `checkpoint.load`: a folder of Hugging Face, of Megatron-core's format, or with checkpoints."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return _check_model("checkpoint.load", config.model, load)
    problems = _check_folder("checkpoint.load", load)
    if load is not None and config.debug.rollout_only:
        rule, fix = "name a Hugging Face folder with debug.rollout_only", "engines cannot read training checkpoints"
        return [Problem(path="checkpoint.load", rule=rule, value=load, fix=fix)]
    if load is None or problems:
        return problems
    if is_bare_weights(load):
        return _check_bare_weights("checkpoint.load", load, config.train.backend)
    folder = Path(load).expanduser()
    if not CheckpointStore.has_checkpoint(folder) and not CheckpointStore.is_leftover(folder):
        rule = "name a Hugging Face folder, a checkpoint of a run or a folder in Megatron-core's format (torch_dist)"
        fix = "it has no config.json, no checkpoint.json and no torch_dist/metadata.json; check the path"
        return [Problem(path="checkpoint.load", rule=rule, value=repr(load), fix=fix)]
    try:
        CheckpointStore.resolve(load)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_bare_weights(key: str, path: str, backend: TrainBackendName) -> list[Problem]:
    """Problem of weights in Megatron-core's format, which only its own backend reads."""
    if backend == TrainBackendName.megatron:
        return []
    rule = f"be a Hugging Face folder or a checkpoint of a run with train.backend={backend}"
    fix = f"it is in Megatron-core's format; convert it: rlscale-convert {path} <new folder>"
    return [Problem(path=key, rule=rule, value=path, fix=fix)]


def _check_folder(key: str, path: str | None) -> list[Problem]:
    if path is None or Path(path).expanduser().is_dir():
        return []
    return [Problem(path=key, rule="name a folder that exists", value=path, fix="check the path")]


def _check_model(key: str, config: ModelConfig, checkpoint: str | None) -> list[Problem]:
    """Problems of a local folder. A hub id is resolved later."""
    if checkpoint is None:
        return []
    try:
        resolve_model(replace(config, build=None, hf_checkpoint=checkpoint))
    except ConfigError as error:
        # Only the problem of the path gets this key; a problem of a model field keeps the name of the field.
        policy = "model.hf_checkpoint"
        return [replace(each, path=key) if each.path == policy else each for each in error.problems]
    return []
