import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.errors import ConfigError
from rlscale.rewards import BUILTINS, RewardFunctions, RewardSpec, load_reward, prepare_reward
from rlscale.types import Prompt, Sample

MODULE = """
class Judge:
    def __call__(self, sample):
        return 3.0

def score(sample):
    return len(sample.response)

def by_keyword(*, sample):
    return 5

async def later(sample):
    return 1

def two(sample, group):
    return 0

def with_values(sample, custom):
    return custom["bonus"]

def named_with_values(*, sample, custom):
    return custom["bonus"]

judge = Judge()
number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the working directory."""
    (tmp_path / "user_rewards_for_test.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "broken_for_test.py").write_text("import nothing_of_that_name", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != os.getcwd()])
    monkeypatch.delitem(sys.modules, "user_rewards_for_test", raising=False)
    return "user_rewards_for_test"


@pytest.mark.parametrize("name", BUILTINS)
def test_builtins(name: str) -> None:
    assert callable(load_reward(RewardConfig(type=RewardType(name))))


@pytest.mark.parametrize(
    ("response", "value"),
    [(r"so \boxed{24}, no, \boxed{ 25 }.", 1.0), (r"\boxed{025}", 0.0), ("25", 0.0), (r"\boxed{25} or \boxed{2", 1.0)],
)
def test_boxed_reads_the_last_box_alone(response: str, value: float, make_sample: Callable[..., Sample]) -> None:
    reward = load_reward(RewardConfig(type=RewardType.boxed_exact_match))
    sample = make_sample(response, label="25")
    assert reward(sample) == value
    assert sample.response == response


@pytest.mark.parametrize(("name", "value"), [("score", 2), ("by_keyword", 5), ("judge", 3.0)])
@pytest.mark.parametrize("separator", [":", "."])
def test_custom_rewards(
    name: str, value: float, separator: str, module: str, make_sample: Callable[..., Sample]
) -> None:
    # It wins over the built-in.
    reward = load_reward(RewardConfig(type=RewardType.random, custom_path=f"{module}{separator}{name}"))
    assert reward(make_sample("ab")) == value


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:nothing", "reward.custom_path must be importable, got {}:nothing"),
        ("no_such_package_for_test:score", "ModuleNotFoundError: No module named 'no_such_package_for_test'"),
        ("broken_for_test:score", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("{}:number", "must be callable, got {}:number; it is of type int"),
        ("{}:Judge", "must be a function or an object, got {}:Judge; it is a class"),
        ("{}:two", "must be callable with (sample) or (args, sample), got {}:two; its parameters are (sample, group)"),
    ],
)
def test_unusable_custom_rewards(path: str, message: str, module: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("{}", module))):
        load_reward(RewardConfig(custom_path=path.replace("{}", module)))


def test_without_a_type_only_rows_name_rewards() -> None:
    reward = load_reward(RewardConfig())
    prompt = Prompt(index=0, text="", token_ids=(1,), label="4")
    assert (
        reward(
            Sample(
                index=0,
                group_index=0,
                prompt=replace(prompt, metadata={"rm_type": "exact_match"}),
                seed=0,
                response="4",
            )
        )
        == 1
    )
    with pytest.raises(ValueError, match=r"sample\.reward must be set by the generate function, got None"):
        reward(Sample(index=0, group_index=0, prompt=prompt, seed=0, response="4"))


def test_reward_type_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"reward\.url must be set with remote_rm"):
        load_reward(RewardConfig(type=RewardType.remote_rm))


@pytest.mark.parametrize("name", ["with_values", "named_with_values"])
def test_a_reward_receives_the_values_of_custom(module: str, name: str, make_sample: Callable[..., Sample]) -> None:
    reward = load_reward(RewardConfig(custom_path=f"{module}:{name}"), custom={"bonus": 4.0})
    assert reward(make_sample("x")) == 4.0


def test_functions_by_name(module: str, make_sample: Callable[..., Sample]) -> None:
    config = RewardConfig(functions={"right": "exact_match", "math": "math", "length": f"{module}:score"})
    loaded = prepare_reward(config)
    assert isinstance(loaded, RewardFunctions)
    assert [isinstance(each, RewardSpec) for each in loaded.functions.values()] == [False, True, True]
    sample = make_sample("2", label="2")
    assert [load_reward(config, name=name)(sample) for name in config.functions] == [1.0, 0.0, 1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_module_of_this_name:a", "reward.functions.a must be importable, got no_module_of_this_name:a; importing"),
        ("MODULE:two", "reward.functions.a must be callable with (sample) or (args, sample), got "),
        ("remote_rm", "reward.url must be set with remote_rm"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(function: str, message: str, module: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        prepare_reward(RewardConfig(functions={"a": function.replace("MODULE", module)}))
