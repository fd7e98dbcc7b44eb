"""The file of `sglang.config` that a rehearsal writes for its cut engines."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.config import RunConfig, load_config
from rlscale.config.rules import server_groups
from rlscale.driver.warmup import to_hydra
from rlscale.rehearsal.cut_layout import cut_layout, read_sizes
from rlscale.rehearsal.engine_file import engine_file_overrides
from rlscale.rehearsal.rehearsal_config import layout_overrides

GIVEN = ("rollout=sglang", "reward.type=exact_match", "model=qwen3_4b", "model.hf_checkpoint=org/policy")
JUDGE = {"name": "judge", "model_path": "org/judge", "server_groups": [{"worker_type": "regular", "num_gpus": 2}]}


def load(*overrides: str) -> RunConfig:
    return load_config([*GIVEN, "cluster.device=cuda", *overrides])


def policy(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"name": "actor", "model_path": "org/policy", "server_groups": list(groups)}


def write(folder: Path, *models: dict[str, Any]) -> str:
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"sglang": list(models)}))
    return f"sglang.config={file}"


def cut(config: RunConfig, given: str, folder: Path, *, max_processes: int) -> RunConfig:
    """The config of the rehearsal on GPUs."""
    sizes = cut_layout(read_sizes(config), max_processes=max_processes)
    overrides = layout_overrides(config, sizes) | engine_file_overrides(config, sizes, folder / "cut.yaml")
    found = load(given, *(f"{key}={to_hydra(value)}" for key, value in overrides.items()))
    assert read_sizes(found) == sizes
    return found


@pytest.mark.parametrize("max_processes", [32, 5, 3])
def test_groups_of_two_sizes_are_cut(tmp_path: Path, max_processes: int) -> None:
    prefill = {"worker_type": "prefill", "num_gpus": 8, "num_gpus_per_engine": 8, "overrides": {"pp_size": 2}}
    decode = {"worker_type": "decode", "num_gpus": 16, "num_gpus_per_engine": 4, "overrides": {"page_size": 1}}
    given = write(tmp_path, policy(prefill, decode, decode), JUDGE)
    config = load(given)
    assert read_sizes(config).engines == 8 and read_sizes(config).prefill_engines == 1
    found = cut(config, given, tmp_path, max_processes=max_processes)
    groups = server_groups(found)
    assert sum(each.num_engines for each in groups) < max_processes
    assert groups[0].server_args["pp_size"] == 2 and "pp_size" not in groups[1].server_args
    assert groups[0].num_gpus_per_engine == 2 * groups[1].num_gpus_per_engine
    assert found.sglang.frozen_models.keys() == {"judge"}


def test_equal_engines_of_a_file_are_cut(tmp_path: Path) -> None:
    regular = {"worker_type": "regular", "num_gpus": 64, "num_gpus_per_engine": 2}
    given = write(tmp_path, policy(regular))
    found = cut(load(given), given, tmp_path, max_processes=8)
    assert found.cluster.rollout_num_gpus == 2 * read_sizes(found).engines < 16


def test_a_run_without_a_file_writes_none(tmp_path: Path) -> None:
    config = load("cluster.rollout_num_gpus=2")
    assert engine_file_overrides(config, read_sizes(config), tmp_path / "cut.yaml") == {}
    assert not list(tmp_path.iterdir())
