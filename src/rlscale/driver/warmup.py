"""Warm-up run before a run: `model.warmup_experiment`."""

import json
from dataclasses import replace
from pathlib import Path

from rlscale.config import EngineKind, RunConfig, config_hash, load_config, to_dict
from rlscale.errors import ConfigError
from rlscale.models.resolve_model import cache_root

_INHERITED_GROUPS = ("model", "cluster", "fsdp")
_ENGINE_GROUPS = {EngineKind.sglang: ("sglang", "router")}
_INHERITED_KEYS = {
    "train": ("backend", "dtype", "seed", "env_vars"),
    "rollout": ("engine", "num_slots", "deterministic", "external_engine_addrs"),
    "logging": ("console",),
}


def warmup_config(config: RunConfig) -> RunConfig | None:
    """The config of the warm-up: its experiment with this run's model, hardware and seed; None: there is no warm-up.

    Its run folder is in the cache, named after the hash of that config, so that all runs with the same warm-up share
    one.
    """
    if config.model.warmup_experiment is None:
        return None
    values = to_dict(config)
    overrides = [f"+experiment={config.model.warmup_experiment}"]
    for group in (*_INHERITED_GROUPS, *_ENGINE_GROUPS.get(config.rollout.engine, ())):
        overrides += [_override(group, key, value) for key, value in values[group].items()]
    for group, keys in _INHERITED_KEYS.items():
        overrides += [_override(group, key, values[group][key]) for key in keys]
    overrides += ["model.warmup_experiment=null"]  # of this run: a warm-up has no warm-up
    config_dir = None if config.run.config_dir is None else Path(config.run.config_dir)
    try:
        warmup = load_config(overrides, config_dir=config_dir)
    except ConfigError as error:
        origin = f"in the warm-up, model.warmup_experiment={config.model.warmup_experiment}"
        raise ConfigError([replace(problem, origin=origin) for problem in error.problems]) from error
    # Loaded a second time, because the folder is part of the config and its name the hash of the rest.
    folder = cache_root(config.model.cache_dir) / "warmups" / f"{config.model.warmup_experiment}-{config_hash(warmup)}"
    return load_config([*overrides, f"run.dir={json.dumps(str(folder))}"], config_dir=config_dir)


def _override(group: str, key: str, value: object) -> str:
    return f"{group}.{key}={_to_hydra(value)}"


def _to_hydra(value: object) -> str:
    """A value in Hydra's override grammar: JSON, but with the keys of mappings unquoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_to_hydra(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_hydra, value)) + "]"
    return json.dumps(value)
