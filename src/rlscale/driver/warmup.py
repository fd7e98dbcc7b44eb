"""The run that comes before a run: `model.warmup_experiment`."""

import json
from dataclasses import replace
from pathlib import Path

from rlscale.config import EngineKind, RunConfig, config_hash, load_config, to_dict
from rlscale.errors import ConfigError
from rlscale.models.resolve_model import cache_root

_INHERITED = ("model", "cluster", "fsdp")
_OF_ENGINE = {EngineKind.sglang: ("sglang", "router")}
_INHERITED_KEYS = {
    "train": ("backend", "dtype", "seed", "env_vars"),
    "rollout": ("engine", "num_slots", "deterministic", "external_engine_addrs"),
    "logging": ("console",),
}


def warmup_config(config: RunConfig) -> RunConfig | None:
    """The config of the warm-up: its experiment on this run's model, hardware and seed; None when there is none.

    Its run folder lies in the cache under the hash of that config, so that every run with the same warm-up shares one.
    """
    if config.model.warmup_experiment is None:
        return None
    values = to_dict(config)
    overrides = [f"+experiment={config.model.warmup_experiment}"]
    for group in (*_INHERITED, *_OF_ENGINE.get(config.rollout.engine, ())):
        overrides += [_override(group, key, value) for key, value in values[group].items()]
    for group, keys in _INHERITED_KEYS.items():
        overrides += [_override(group, key, values[group][key]) for key in keys]
    overrides += ["model.warmup_experiment=null"]
    config_dir = None if config.run.config_dir is None else Path(config.run.config_dir)
    try:
        warmup = load_config(overrides, config_dir=config_dir)
    except ConfigError as error:
        origin = f"in the warm-up, model.warmup_experiment={config.model.warmup_experiment}"
        raise ConfigError([replace(problem, origin=origin) for problem in error.problems]) from error
    folder = cache_root(config.model.cache_dir) / "warmups" / f"{config.model.warmup_experiment}-{config_hash(warmup)}"
    return load_config([*overrides, f"run.dir={json.dumps(str(folder))}"], config_dir=config_dir)


def _override(group: str, key: str, value: object) -> str:
    return f"{group}.{key}={_word(value)}"


def _word(value: object) -> str:
    """A value in Hydra's grammar, which is JSON but for the names in a mapping."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_word(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_word, value)) + "]"
    return json.dumps(value)
