"""Limit of the values that aliases of a YAML file repeat, in each kind of file that users write."""

from pathlib import Path

import pytest
import yaml

from rlscale.config.hydra.sweep import run_sweep
from rlscale.config.yaml_aliases import AliasError, check_aliases, load_yaml
from rlscale.errors import ConfigError
from rlscale.migration.config_files import compose_file
from tests.unit.config.config_errors import config_errors

LISTS = "\n".join(["a0: &a0 [x, x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 60))])
MAPPINGS = "\n".join(["a0: &a0 {k: v}", *(f"a{i}: &a{i} {{k: *a{i - 1}, l: *a{i - 1}}}" for i in range(1, 60))])
MERGES = "\n".join(["a0: &a0 {k: v}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))])
LONG = f"a: &a {'x' * 5_000}\nb: [{', '.join(['*a'] * 5_000)}]"


@pytest.mark.parametrize("text", [LISTS, MAPPINGS, MERGES, LONG])
def test_aliases_that_stand_for_too_much_are_rejected(text: str) -> None:
    with pytest.raises(AliasError, match="repeat more than 10000 values"):
        load_yaml(text)


@pytest.mark.slow
def test_aliases_of_ordinary_files_are_loaded() -> None:
    text = "defaults: &defaults {n: 8}\nsets: [{<<: *defaults, name: a}, {<<: *defaults, name: b, n: 1}]"
    assert load_yaml(text)["sets"] == [{"n": 8, "name": "a"}, {"n": 1, "name": "b"}]
    assert load_yaml("") is None
    assert len(load_yaml(f"a: [{', '.join(['x & y'] * 11_000)}]")["a"]) == 11_000
    check_aliases("a: &a [*a]")
    check_aliases("a: [&")
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: [&")


@pytest.mark.parametrize("key", ["custom_config_path", "eval.config", "sglang.config"])
def test_a_file_that_a_key_names(key: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(LISTS)
    errors = config_errors("rollout=sglang", f"{key}={tmp_path}/bomb.yaml")
    assert [each for each in errors if each.startswith(f"{key} must name a readable YAML file") and "bomb.yaml" in each]


def test_a_file_of_options(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ncustom:\n" + "\n".join(f"  {line}" for line in LISTS.splitlines())
    (tmp_path / "experiment" / "bomb.yaml").write_text(text)
    (error,) = config_errors("experiment=bomb", config_dir=tmp_path)
    assert "bomb.yaml must expand to fewer values, got too many; its aliases" in error


@pytest.mark.parametrize(("text", "rule"), [("algo: [", "be valid YAML"), (LISTS, "expand to fewer values")])
@pytest.mark.slow
def test_a_sweep_over_an_unreadable_file_is_an_error(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    words = ["experiment=mine", "algo.eps_clip=0.1,0.2"]
    with pytest.raises(ConfigError, match=f"mine.yaml must {rule}"):
        run_sweep(words, run_loaded=lambda index, loaded: None, config_dir=tmp_path)


def test_a_file_to_migrate(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text("data: {}\ntrainer: {}\n" + LISTS)
    with pytest.raises(ValueError, match=r"bomb\.yaml; its aliases"):
        compose_file(tmp_path / "bomb.yaml")
