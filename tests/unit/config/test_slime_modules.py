import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.config.slime_modules import MODULES, VARIABLE, install_slime_modules, remove_slime_modules
from rlscale.config.user_functions import check_hooks
from rlscale.errors import ConfigError
from tests.unit.config.rules.valid_config import config_with

MODULE = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

async def score(args, sample: Sample, **kwargs):
    return float(isinstance(sample, Sample))
"""


@pytest.fixture(autouse=True)
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "slime_code_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    remove_slime_modules()
    sys.modules.pop("slime_code_for_test", None)


def test_every_name_of_the_table_exists() -> None:
    install_slime_modules()
    for module, names in MODULES.items():
        found = importlib.import_module(module)
        assert all(callable(getattr(found, name)) for name in names), module


def test_names_are_those_of_rlscale() -> None:
    install_slime_modules()
    sample = importlib.import_module("slime.utils.types").Sample
    assert sample.__name__ == "DocumentSample"
    assert sample(status=sample.Status.TRUNCATED).status.value == "truncated"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("from slime.utils.types import ParamInfo", ImportError, "cannot import name 'ParamInfo'"),
        ("import slime.agent.sandbox", ModuleNotFoundError, "slime.agent must be a module that rlscale provides, one"),
    ],
)
def test_other_names_are_import_errors(code: str, error: type[Exception], message: str) -> None:
    install_slime_modules()
    with pytest.raises(error, match=message):
        exec(code, {})


def test_without_the_key_nothing_is_provided() -> None:
    assert importlib.util.find_spec("slime") is None
    (problem,) = check_hooks(config_with({"reward.custom_path": "slime_code_for_test:score"}))
    assert "No module named 'slime'" in str(problem)


def test_with_the_key_a_function_imports_them_and_so_do_child_processes() -> None:
    values = {"reward.custom_path": "slime_code_for_test:score", "run.slime_modules": True}
    assert check_hooks(config_with(values)) == []
    assert os.environ[VARIABLE] == "1"
    remove_slime_modules()
    assert VARIABLE not in os.environ


def test_an_installed_slime_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "slime.py").write_text("", encoding="utf-8")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"run\.slime_modules must be false where slime is installed, got true"):
        install_slime_modules()
    (problem,) = check_hooks(config_with({"run.slime_modules": True}))
    assert problem.path == "run.slime_modules"


def test_a_clone_of_slime_in_the_current_folder_hides_nothing(tmp_path: Path) -> None:
    package = tmp_path / "slime" / "slime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    importlib.invalidate_caches()
    install_slime_modules()
    assert importlib.import_module("slime.utils.types").Sample.__name__ == "DocumentSample"
