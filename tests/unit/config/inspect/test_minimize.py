"""A minimal configuration resolves to the original, and every value in it is needed."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.inspect import minimize as minimize_module
from rlscale.config.inspect.minimize import Minimal, minimize, minimize_from
from rlscale.config.load import load_config_with_notes
from rlscale.config.run_config import RunConfig
from rlscale.config.serialize import config_hash, to_dict
from rlscale.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def read_option_files_once() -> Iterator[None]:
    """Caches the values of the packaged options, which take half of the time of `minimize` to read."""
    read = minimize_module._option_values
    packaged = ConfigFolders.find()

    @cache
    def read_once(group: str, name: str) -> tuple[tuple[str, Any], ...]:
        return tuple(read(group, name, packaged))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimize_module, "_option_values", lambda group, name, folders: read_once(group, name))
        yield


def load(*overrides: str, config_dir: Path | None = None) -> RunConfig:
    return load_config_with_notes(overrides, config_dir=config_dir, to_run=False).config


def resolved_again(minimal: Minimal, folder: Path) -> RunConfig:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "minimal.yaml").write_text(minimal.yaml(), encoding="utf-8")
    return load("experiment=minimal", config_dir=folder)


QUICK = ("quickstart", "qwen3_30b_a3b_gspo", "geo3k_vlm", "glm45_355b_a32b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly)
        for name in ConfigFolders.find().groups()["experiment"]
    ],
)
def test_every_experiment_is_restored(experiment: str, tmp_path: Path) -> None:
    try:
        config = load(f"experiment={experiment}")
    except ConfigError:
        pytest.skip("it needs further overrides")
    minimal = minimize(to_dict(config))
    assert config_hash(resolved_again(minimal, tmp_path)) == config_hash(config)
    assert config_hash(load(*minimal.overrides())) == config_hash(config)


OVERRIDES = ("algo=gspo", "optim.lr=3e-4", "sglang.page_size=16", "algo.mis.mode=mask", "rollout.stop=['</s>','a, b']")


@pytest.mark.slow
def test_the_typed_overrides_remain() -> None:
    config = load("experiment=quickstart", *OVERRIDES)
    minimal = minimize_from(to_dict(config), "quickstart")
    assert minimal.values == {
        "algo.advantage_estimator": "gspo",
        "algo.eps_clip": 3e-4,
        "algo.eps_clip_high": 4e-4,
        "optim.lr": 3e-4,
        "sglang.page_size": 16,
        "algo.mis.mode": "mask",
        "rollout.stop": ["</s>", "a, b"],
    }
    assert config_hash(load(*minimal.overrides())) == config_hash(config)
    assert minimal.command().startswith("rlscale-train experiment=quickstart ")


@pytest.mark.slow
def test_options_replace_equal_values() -> None:
    minimal = minimize(to_dict(load("experiment=quickstart", *OVERRIDES)))
    assert minimal.options["algo"] == "gspo" and minimal.options["model"] == "tiny_qwen3"
    assert not any(path.startswith(("algo.eps", "model.num", "batch.global")) for path in minimal.values)
    text = minimal.yaml()
    assert text.startswith("# @package _global_\n") and "  - override /algo: gspo\n" in text
    assert yaml.safe_load(text)["sglang"] == {"page_size": 16}


@pytest.mark.slow
def test_every_value_is_needed() -> None:
    config = load("experiment=quickstart", "optim.lr=3e-4")
    minimal = minimize(to_dict(config))
    for path in minimal.values:
        fewer = Minimal(
            options=minimal.options, values={key: value for key, value in minimal.values.items() if key != path}
        )
        try:
            again = load(*fewer.overrides())
        except ConfigError:
            continue
        assert config_hash(again) != config_hash(config), path


@pytest.mark.slow
def test_redacted_secrets_and_names_of_the_run_are_skipped() -> None:
    values = to_dict(load("experiment=quickstart", "run.name=mine"))
    values["logging"]["wandb"]["key"] = "<redacted>"
    minimal = minimize(values)
    assert not any(path.startswith(("run.", "logging.wandb")) for path in minimal.values)


def test_a_file_of_another_version_is_reported() -> None:
    values = to_dict(load("experiment=quickstart"))
    values["algo"]["gone"] = 1
    with pytest.raises(ConfigError, match=r"algo\.gone must be a known key"):
        minimize(values)
