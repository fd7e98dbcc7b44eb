"""User functions are imported and checked against their arguments before anything starts."""

import os
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from rlscale.cli.app import main_train
from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.keys import keys
from rlscale.config.user_functions import HOOKS, check_hooks, is_document_form, load_hook
from tests.unit.config.rules.valid_config import config_with

MODULE = """
class Source:
    def __init__(self, config, tokenizer): ...

class Empty: ...

def source(config, tokenizer, custom=None): ...

def score(sample): return 1.0

def by_name(*, sample, custom): return 1.0

async def judged(sample, judge): return 1.0

def judged_document(args, sample, judge, **kwargs): return 1.0

def may_be_judged(sample, judge=None): return 1.0

def one(lp): ...

def two(lp, tokens): ...

def three(first, second, third): ...

def document_score(args, sample, **kwargs): return 1.0

def document_score_of_a_sample(args, sample=None): return 1.0

def any_number(*args): return 1.0

def document_filter(args, samples, **kwargs): return True

async def document_generate(args, sample, sampling_params, evaluation=False): return sample

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
        ("reward.custom_path", "document_score", {}),
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


def test_a_file_below_the_working_folder_is_a_module(tmp_path: Path) -> None:
    assert problems_of("reward.custom_path", "code_for_test.py:score") == []
    assert problems_of("reward.custom_path", "./code_for_test.py:score") == []
    (tmp_path / "rewards_for_test").mkdir()
    (tmp_path / "rewards_for_test" / "mine.py").write_text(MODULE, encoding="utf-8")
    assert problems_of("reward.custom_path", "rewards_for_test/mine.py:score") == []
    (missing,) = problems_of("reward.custom_path", "no_such_file.py:score")
    assert "must be importable, got no_such_file.py:score" in missing
    assert missing.endswith("; check its name, and that it is installed or in " + os.getcwd())


@pytest.mark.parametrize(
    ("key", "path", "others", "message"),
    [
        ("data.data_source_path", "code_for_test:Empty", {}, "be callable with (config, tokenizer) or (args), got"),
        (
            "data.data_source_path",
            "code_for_test:number",
            {},
            "be a class or a function that returns a data source, got",
        ),
        (
            "reward.custom_path",
            "code_for_test:three",
            {},
            "be callable with (sample) or (args, sample), got code_for_test:three; its",
        ),
        ("reward.custom_path", "code_for_test:Source", {}, "be a function or an object, got code_for_test:Source"),
        ("algo.custom_loss_function_path", "code_for_test:one", LOSS, "be callable with (logprobs, tokens), got"),
        ("algo.custom_loss_function_path", "code_for_test:number", LOSS, "be callable, got"),
        ("algo.custom_reducer_function_path", "code_for_test:two", {}, "be callable with (step), got"),
        ("train.rollout_data_postprocess_path", "code_for_test:two", {}, "be callable with (rollout), got"),
        ("reward.custom_path", "code_for_test:scor", {}, "has no 'scor'; did you mean score?"),
        ("reward.custom_path", "code_for_test.py", {}, "write the name of the function, too: code_for_test.py:<name>"),
        ("reward.custom_path", "exits_for_test:f", {}, "importing 'exits_for_test' failed: SystemExit: 3"),
        ("reward.custom_path", "wrong_for_test:f", {}, "importing 'wrong_for_test' failed: SyntaxError"),
        ("reward.custom_path", "gone_for_test.deep:f", {}, "No module named 'gone_for_test'"),
        (
            "sampling.dynamic_filter_path",
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            {},
            "No module named 'slime'; set run.slime_modules=true: rlscale then provides",
        ),
    ],
)
def test_invalid_user_functions_are_reported(key: str, path: str, others: dict[str, Any], message: str) -> None:
    (found,) = problems_of(key, path, **others)
    assert found.startswith(f"{key} must ") and message in found


ENGINE = "reward.engine.num_gpus"


@pytest.mark.parametrize(
    ("function", "num_gpus", "message"),
    [
        ("judged", 0, "reward.custom_path must have no parameter judge without reward.engine.num_gpus, got"),
        (
            "score",
            2,
            "reward.engine.num_gpus must be 0 without a reward that asks the engines, got 2; set it to 0, or add",
        ),
        ("judged", 1, None),
        ("judged_document", 1, None),
        ("may_be_judged", 0, None),
        ("may_be_judged", 1, None),
        ("document_score", 1, None),  # among its **kwargs
        ("document_score", 0, None),
    ],
)
def test_a_reward_that_asks_a_judge_and_its_engines_need_each_other(
    function: str, num_gpus: int, message: str | None
) -> None:
    found = problems_of("reward.custom_path", f"code_for_test:{function}", **{ENGINE: num_gpus})
    assert len(found) == (message is not None)
    assert message is None or found[0].startswith(message)


def test_the_built_in_judge_uses_the_engines_beside_other_functions() -> None:
    given = {"style": "code_for_test:score", "tone": "judge"}
    assert check_hooks(config_with({"reward.functions": given, ENGINE: 1})) == []


def test_each_function_of_several_rewards_is_checked() -> None:
    given = {
        "right": "math",
        "whole": "code_for_test:score",
        "style": "code_for_test:three",
        "gone": "code_for_test:scor",
    }
    found = [str(problem) for problem in check_hooks(config_with({"reward.functions": given}))]
    assert len(found) == 2
    assert found[0].startswith(
        "reward.functions.style must be callable with (sample) or (args, sample), got code_for_te"
    )
    assert found[1].startswith("reward.functions.gone must be importable, got code_for_test:scor; ")


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("reward.custom_path", "score", False),
        ("reward.custom_path", "by_name", False),
        ("reward.custom_path", "any_number", False),
        ("reward.custom_path", "document_score", True),
        ("reward.custom_path", "document_score_of_a_sample", True),
        ("reward.custom_path", "two", True),
        ("sampling.dynamic_filter_path", "score", False),
        ("sampling.dynamic_filter_path", "document_filter", True),
        ("sampling.custom_generate_function_path", "two", False),
        ("sampling.custom_generate_function_path", "document_generate", True),
        ("algo.custom_loss_function_path", "two", False),
    ],
)
def test_the_form_is_decided_by_the_parameters(key: str, name: str, expected: bool) -> None:
    assert is_document_form(key, load_hook(key, f"code_for_test:{name}")) is expected


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


def test_every_key_with_a_dotted_path_has_a_hook() -> None:
    dotted = {
        key.path
        for key in keys().values()
        if any(getattr(each, "pattern", None) == DOTTED_PATH for each in key.constraints)
        or any(getattr(inner, "pattern", None) == DOTTED_PATH for inner in key.constraints)
        or (get_origin(key.type) is list and get_args(key.type) == (str,) and key.name.endswith("_paths"))
    }
    assert {path for path in keys() if path.endswith(("_path", "_paths"))} - dotted == {
        "custom_config_path",
        "rollout.script_path",  # a function or a file
    }
    assert dotted <= HOOKS.keys() - {"reward.functions"} <= dotted


def test_the_command_reports_it_before_a_run_and_before_any_job_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[Any] = []
    path = "reward.custom_path=code_for_test:three"
    for words in ([path], ["-m", f"{path},code_for_test:score"]):
        assert main_train(words, make_job=ran.append, check_job=lambda config, broken: check_hooks(config)) == 2  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert (
        err.count("reward.custom_path must be callable with (sample) or (args, sample), got code_for_test:three") == 2
    )
    assert err.count(" (command line)") == 2
    assert ran == []
