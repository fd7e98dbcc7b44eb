"""User functions are imported and checked against their arguments before anything starts."""

import os
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from rlscale.cli.app import main_train
from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.keys import keys
from rlscale.config.unsupported import supported_values
from rlscale.config.user_functions import HOOKS, check_hooks
from tests.unit.config.rules.valid_config import config_with

MODULE = """
class Source:
    def __init__(self, config, tokenizer): ...

class Empty: ...

def source(config, tokenizer, custom=None): ...

def score(sample): return 1.0

def by_name(*, sample, custom): return 1.0

def one(lp): ...

def two(lp, tokens): ...

number = 3
judge = score
"""
SFT = {"algo.loss_type": "sft_loss"}
LOSS = {"algo.loss_type": "custom_loss"}


@pytest.fixture(autouse=True)
def in_a_folder_with_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code_for_test.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "exits_for_test.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (tmp_path / "wrong_for_test.py").write_text("def f(:", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != os.getcwd()])
    monkeypatch.delitem(sys.modules, "code_for_test", raising=False)


def problems_of(key: str, path: str, **others: Any) -> list[str]:
    return [str(problem) for problem in check_hooks(config_with({key: path, **others}))]


@pytest.mark.parametrize(
    ("key", "name", "others"),
    [
        ("data.data_source_path", "Source", {}),
        ("data.data_source_path", "source", {}),
        ("reward.custom_path", "score", {}),
        ("reward.custom_path", "by_name", {}),
        ("reward.custom_path", "judge", {}),
        ("algo.custom_loss_function_path", "two", LOSS),
        ("algo.custom_tis_function_path", "score", {"algo.use_tis": True}),
        ("algo.custom_advantage_function_path", "score", {}),
        ("algo.custom_reducer_function_path", "score", {}),
        ("train.rollout_data_postprocess_path", "one", {}),
    ],
)
@pytest.mark.parametrize("separator", [":", "."])
def test_what_can_be_called_is_right(key: str, name: str, others: dict[str, Any], separator: str) -> None:
    assert problems_of(key, f"code_for_test{separator}{name}", **others) == []


@pytest.mark.parametrize(
    ("key", "path", "others", "message"),
    [
        ("data.data_source_path", "code_for_test:Empty", {}, "be callable with (config, tokenizer), got"),
        (
            "data.data_source_path",
            "code_for_test:number",
            {},
            "be a class or a function that returns a data source, got",
        ),
        ("reward.custom_path", "code_for_test:two", {}, "be callable with (sample), got code_for_test:two; its"),
        ("reward.custom_path", "code_for_test:Source", {}, "be a function or an object, got code_for_test:Source"),
        ("algo.custom_loss_function_path", "code_for_test:one", LOSS, "be callable with (logprobs, tokens), got"),
        ("algo.custom_loss_function_path", "code_for_test:number", LOSS, "be callable, got"),
        ("algo.custom_reducer_function_path", "code_for_test:two", {}, "be callable with (step), got"),
        ("train.rollout_data_postprocess_path", "code_for_test:two", {}, "be callable with (rollout), got"),
        ("reward.custom_path", "code_for_test:scor", {}, "has no 'scor'; did you mean score?"),
        ("reward.custom_path", "exits_for_test:f", {}, "importing 'exits_for_test' failed: SystemExit: 3"),
        ("reward.custom_path", "wrong_for_test:f", {}, "importing 'wrong_for_test' failed: SyntaxError"),
        ("reward.custom_path", "gone_for_test.deep:f", {}, "No module named 'gone_for_test'"),
    ],
)
def test_invalid_user_functions_are_reported(key: str, path: str, others: dict[str, Any], message: str) -> None:
    (found,) = problems_of(key, path, **others)
    assert found.startswith(f"{key} must ") and message in found


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("reward.custom_path", SFT),
        ("algo.custom_loss_function_path", {}),
        ("algo.custom_advantage_function_path", SFT),
        ("train.rollout_data_postprocess_path", SFT),
        ("algo.custom_tis_function_path", {}),
    ],
)
def test_unused_functions_are_not_imported(key: str, others: dict[str, Any]) -> None:
    assert problems_of(key, "gone_for_test:f", **others) == []


def test_every_key_with_a_dotted_path_has_a_hook_or_is_unsupported() -> None:
    dotted = {
        key.path
        for key in keys().values()
        if any(getattr(each, "pattern", None) == DOTTED_PATH for each in key.constraints)
        or any(getattr(inner, "pattern", None) == DOTTED_PATH for inner in key.constraints)
        or (get_origin(key.type) is list and get_args(key.type) == (str,) and key.name.endswith("_paths"))
    }
    assert {path for path in keys() if path.endswith(("_path", "_paths"))} - dotted == {"custom_config_path"}
    assert dotted - supported_values().keys() == HOOKS.keys()


def test_the_command_reports_it_before_a_run_and_before_any_job_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[Any] = []
    path = "reward.custom_path=code_for_test:two"
    assert main_train([path], make_job=ran.append, check_job=check_hooks) == 2  # type: ignore[arg-type]
    assert main_train(["-m", f"{path},code_for_test:score"], make_job=ran.append, check_job=check_hooks) == 2  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.count("reward.custom_path must be callable with (sample), got code_for_test:two") == 2
    assert err.count(" (command line)") == 2
    assert ran == []
