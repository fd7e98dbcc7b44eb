import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.errors import ConfigError
from rlscale.rewards import BUILTINS, load_reward
from rlscale.types import Sample

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
        ("{}:two", "must be callable with (sample), got {}:two; its parameters are (sample, group)"),
    ],
)
def test_unusable_custom_rewards(path: str, message: str, module: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("{}", module))):
        load_reward(RewardConfig(custom_path=path.replace("{}", module)))


def test_reward_type_is_unset_or_unsupported() -> None:
    with pytest.raises(ConfigError, match=r"reward\.type must be set, got None"):
        load_reward(RewardConfig())
    with pytest.raises(
        ConfigError,
        match=r"reward\.type must be one of exact_match, math, random, boxed_exact_match, boxed_math, got remote_rm",
    ):
        load_reward(RewardConfig(type=RewardType.remote_rm))


@pytest.mark.parametrize("name", ["with_values", "named_with_values"])
def test_a_reward_receives_the_values_of_custom(module: str, name: str, make_sample: Callable[..., Sample]) -> None:
    reward = load_reward(RewardConfig(custom_path=f"{module}:{name}"), custom={"bonus": 4.0})
    assert reward(make_sample("x")) == 4.0
