"""Warm-up run before a run: `model.warmup_experiment`."""

import hashlib
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from rlscale.config import EngineKind, RunConfig, config_hash, load_config, to_dict
from rlscale.config.groups.data import prompt_paths
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.problems import nearest
from rlscale.data.data_paths import find_data_files
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.models.resolve_model import cache_root, is_hf_folder

_INHERITED_GROUPS = ("model", "cluster", "fsdp")
_ENGINE_GROUPS = {EngineKind.sglang: ("sglang", "router")}
_INHERITED_KEYS = {
    "train": ("backend", "dtype", "seed", "env_vars"),
    "rollout": ("engine", "num_slots", "deterministic", "external_engine_addrs"),
    "logging": ("console",),
}


ORIGIN = "in the warm-up, model.warmup_experiment={}"

HASHED_BYTES = 1 << 28
"""Largest data file whose content is hashed, in a second; of a larger one size and time of change count."""


def warmup_is_used(config: RunConfig) -> bool:
    """Whether the run starts from the weights of a warm-up. A script answers without weights."""
    load = config.checkpoint.load
    reads_weights = config.rollout.engine != EngineKind.scripted
    return config.model.warmup_experiment is not None and reads_weights and (load is None or not is_hf_folder(load))


def warmup_config(config: RunConfig) -> RunConfig | None:
    """The config of the warm-up: its experiment with this run's model, hardware and seed; None: there is no warm-up.

    Its run folder is in the cache, named after the hash of that config and of its data files, so that all runs with the
    same warm-up share one, and changed demonstrations are learned again.

    Raises:
        ConfigError: there is no such experiment, or the model, hardware or seed do not fit it.
    """
    if config.model.warmup_experiment is None:
        return None
    config_dir = None if config.run.config_dir is None else Path(config.run.config_dir)
    _check_name(config.model.warmup_experiment, config_dir)
    values = to_dict(config)
    if not config.cluster.rollout_num_gpus and config.rollout.engine != EngineKind.external:
        # A run that generates nothing has no engines; its warm-up is evaluated by those of its experiment.
        del values["cluster"]["rollout_num_gpus"]
    overrides = [f"+experiment={config.model.warmup_experiment}"]
    for group in (*_INHERITED_GROUPS, *_ENGINE_GROUPS.get(config.rollout.engine, ())):
        overrides += [_override(group, key, value) for key, value in values[group].items()]
    for group, keys in _INHERITED_KEYS.items():
        overrides += [_override(group, key, values[group][key]) for key in keys]
    overrides += ["model.warmup_experiment=null"]  # of this run: a warm-up has no warm-up
    try:
        return _load(tuple(overrides), config_dir, config.model.warmup_experiment, config.model.cache_dir)
    except ConfigError as error:
        origin = ORIGIN.format(config.model.warmup_experiment)
        raise ConfigError([replace(problem, origin=origin) for problem in error.problems]) from error


@lru_cache(maxsize=1)
def _load(overrides: tuple[str, ...], config_dir: Path | None, experiment: str, cache_dir: str | None) -> RunConfig:
    """The config of a warm-up and its folder; cached, because the check before the run needs it, too."""
    config = load_config(overrides, config_dir=config_dir)
    # The name of the folder, which is part of the config, is the hash of the rest.
    name = hashlib.sha256(f"{config_hash(config)} {_data_digest(config)}".encode()).hexdigest()[:8]
    folder = cache_root(cache_dir) / "warmups" / f"{experiment}-{name}"
    placed = config.writable_copy()
    placed.run.dir, placed.checkpoint.save = str(folder), str(folder / "checkpoints")
    placed.run.overrides = [*placed.run.overrides, f"run.dir={json.dumps(str(folder))}"]
    placed.freeze()
    return placed


def _data_digest(config: RunConfig) -> str:
    """Digest of the files of `data.prompt_data` or `data.prompt_files`; a missing one is reported when it is read."""
    digest = hashlib.sha256()
    try:
        for file in (each for path in prompt_paths(config.data) for each in find_data_files(path)):
            state = file.stat()
            is_large = state.st_size > HASHED_BYTES
            content = f"{state.st_size} {state.st_mtime_ns}".encode() if is_large else file.read_bytes()
            digest.update(hashlib.sha256(content).digest())
    except (DataError, OSError):
        return ""
    return digest.hexdigest()


def _check_name(experiment: str, config_dir: Path | None) -> None:
    known = ConfigFolders.find(config_dir).groups()["experiment"]
    if experiment in known:
        return
    found = nearest(experiment, known)
    fix = f"did you mean {found}?" if found else "rlscale-train --help lists the experiments; null: no warm-up"
    rule = "be the name of an experiment"
    raise ConfigError([Problem(path="model.warmup_experiment", rule=rule, value=experiment, fix=fix)])


def _override(group: str, key: str, value: object) -> str:
    return f"{group}.{key}={to_hydra(value)}"


def to_hydra(value: object) -> str:
    """A value in Hydra's override grammar: JSON, but with the keys of mappings unquoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {to_hydra(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_hydra, value)) + "]"
    return json.dumps(value)
