"""The file of `sglang.config` for a rehearsal: the engines of the policy as they are cut, and all other models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlscale.config import EngineKind, RunConfig
from rlscale.config.engine_models import read_engine_file
from rlscale.config.server_groups import ServerRole
from rlscale.config.yaml_aliases import load_yaml
from rlscale.rehearsal.cut_layout import LayoutSizes
from rlscale.rehearsal.rehearsal_config import Overrides, parallel_sizes


def engine_file_overrides(config: RunConfig, cut: LayoutSizes, file: Path) -> Overrides:
    """The override that names the file, which is written; none if the run reads no such file.

    Args:
        config: of the run on GPUs, uncut.
        cut: sizes of the rehearsal.
    """
    given = config.sglang.config
    if given is None or not cut.engines or config.rollout.engine != EngineKind.sglang or config.rollout.external:
        return {}
    entries = load_yaml(Path(os.path.expanduser(given)).read_text(encoding="utf-8"))["sglang"]
    models = read_engine_file(given)
    # The model of a rehearsal is a tiny one, so that none is found by its path.
    written = [
        _cut_policy(config, cut, entry)
        if model.is_updated(config.model.hf_checkpoint)
        else {**entry, "update_weights": False}
        for entry, model in zip(entries, models, strict=True)
    ]
    file.write_text(yaml.safe_dump({"sglang": written}, sort_keys=False), encoding="utf-8")
    return {"sglang.config": str(file)}


def _cut_policy(config: RunConfig, cut: LayoutSizes, entry: Mapping[str, Any]) -> dict[str, Any]:
    """One group of each worker type: all groups of a type are equal."""
    groups = {group["worker_type"]: group for group in entry.get("server_groups") or entry["engine_groups"]}
    counts = {str(ServerRole.prefill): (cut.prefill_engines, cut.gpus_per_prefill_engine)}
    cut_groups = []
    for kind, group in groups.items():
        number, size = counts.get(kind, (cut.engines, cut.gpus_per_engine))
        own = {name: value for name, value in (group.get("overrides") or {}).items() if name != "model_path"}
        smaller = parallel_sizes({**config.sglang.server_args, **own}, size)
        own |= {key.removeprefix("sglang."): value for key, value in smaller.items()}
        cut_groups.append(
            {"worker_type": kind, "num_gpus": number * size, "num_gpus_per_engine": size, "overrides": own}
        )
    return {"name": entry["name"], "update_weights": True, "server_groups": cut_groups}
