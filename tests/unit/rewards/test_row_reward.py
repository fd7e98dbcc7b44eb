import asyncio
from typing import Any

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.errors import ConfigError, DataError
from rlscale.rewards import RewardSpec, find_row_types, load_reward, prepare_reward
from rlscale.rewards.row_reward import RowReward
from rlscale.types import Prompt, Sample


def prompt(rm_type: Any = None, *, index: int = 0, label: str = "2") -> Prompt:
    metadata = {} if rm_type is None else {"rm_type": rm_type}
    return Prompt(index=index, text="1+1=", token_ids=(1,), label=label, metadata=metadata)


def grade(rm_type: Any, response: str, *, label: str = "2", **config: Any) -> Any:
    sample = Sample(index=0, group_index=0, prompt=prompt(rm_type, label=label), seed=0, response=response)
    value: Any = load_reward(RewardConfig(**config))(sample)
    return value


def test_the_reward_of_a_row_takes_precedence() -> None:
    assert grade(None, "two 2", type=RewardType.exact_match) == 0.0
    assert grade("f1", "two 2", type=RewardType.exact_match) == pytest.approx(2 / 3)
    assert grade(" boxed_f1 ", r"two \boxed{2}", type=RewardType.exact_match) == 1.0
    assert grade("", "2", type=RewardType.exact_match) == 1.0


def test_rows_with_and_without_named_values_can_be_mixed() -> None:
    assert grade("dapo", "Answer: 2", type=RewardType.exact_match) == 1.0
    assert grade("exact_match", "2", type=RewardType.dapo, key="score") == {"score": 1.0}
    assert grade(None, "Answer: 3", type=RewardType.dapo, key="score")["score"] == -1.0


def test_the_reward_of_a_row_may_be_a_coroutine() -> None:
    async def remote(sample: Sample) -> float:
        return 3.0

    reward = RowReward(lambda sample: 1.0, lambda name: remote, key="score")
    sample = Sample(index=0, group_index=0, prompt=prompt("remote_rm"), seed=0)
    assert asyncio.run(reward(sample)) == {"score": 3.0}


def test_an_unknown_reward_of_a_row_names_file_and_row() -> None:
    assert find_row_types([prompt("f1"), prompt(), prompt("gpqa")], source="a.jsonl") == {"f1", "gpqa"}
    with pytest.raises(
        DataError, match=r"row 3 of a\.jsonl must have one of exact_match, .* as metadata\.rm_type, got"
    ):
        find_row_types([prompt("f1"), prompt("mathematics", index=2)], source="a.jsonl")


def test_a_row_with_a_slow_grader_moves_all_rewards_to_processes() -> None:
    config = RewardConfig(type=RewardType.exact_match)
    assert not isinstance(prepare_reward(config, row_types={"f1"}), RewardSpec)
    spec = prepare_reward(config, row_types={"math"})
    assert isinstance(spec, RewardSpec) and spec.max_cpu_s is not None
    with pytest.raises(ConfigError, match=r"reward\.url must be set with remote_rm, which a row names"):
        prepare_reward(config, row_types={"remote_rm"})
    remote = prepare_reward(RewardConfig(type=RewardType.math, url="http://h"), row_types={"remote_rm"})
    assert isinstance(remote, RewardSpec) and remote.max_cpu_s is None
