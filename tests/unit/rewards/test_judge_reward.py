"""The built-in judge without engines."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.config.groups.judge import JudgeConfig, RewardEngineConfig
from rlscale.errors import ConfigError
from rlscale.plugins.example_judge import ExampleJudge
from rlscale.rewards import RewardSpec, load_reward, prepare_reward
from rlscale.rewards.judge_reward import JudgeAnswerError, JudgeReward, read_score
from rlscale.types import Sample


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good.\nScore: 7", 7.0),
        ("Score: 3 at first, but **Score:** 8.5", 8.5),
        ("score = 0", 0.0),
        ("Final score: 10/10", 10.0),
    ],
)
def test_the_last_score_of_an_answer_counts(answer: str, score: float) -> None:
    assert read_score(answer, JudgeConfig()) == score


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("I cannot say.", r"must match reward.judge.pattern=.*, got 'I cannot say.'"),
        ("Score: 11", r"must be in reward.judge.min_score=0 to max_score=10, got 11 in 'Score: 11'"),
        ("Score: -1", r"got -1 in "),
    ],
)
def test_an_answer_without_a_valid_score_is_no_reward(answer: str, message: str) -> None:
    with pytest.raises(JudgeAnswerError, match=message):
        read_score(answer, JudgeConfig())


def test_a_group_that_matches_no_number_is_named() -> None:
    with pytest.raises(JudgeAnswerError, match=r"the group of reward\.judge\.pattern must match a number, got 'good'"):
        read_score("It is good", JudgeConfig(pattern="is (.*)"))


def test_the_judge_gets_prompt_response_and_label(make_sample: Callable[..., Sample]) -> None:
    judge, sample = ExampleJudge(text="Score: 9"), make_sample("It is {2}", label="2")
    config = JudgeConfig(prompt="Q {prompt} A {response} L {label} {{x}}")
    assert asyncio.run(JudgeReward(config, judge)(sample)) == 9.0
    assert judge.prompts == [[{"role": "user", "content": "Q 1+1= A It is {2} L 2 {x}"}]]
    assert sample.metadata == {"judge_answer": "Score: 9"}


class RecordingJudge(ExampleJudge):
    """Keeps the sampling parameters."""

    given: dict[str, Any]

    async def generate(self, prompt: Any, **given: Any) -> str:
        self.given = given
        return "Score: 1"


def test_the_judge_is_sampled_as_the_keys_say(make_sample: Callable[..., Sample]) -> None:
    judge = RecordingJudge()
    asyncio.run(JudgeReward(JudgeConfig(max_new_tokens=7, temperature=0.25), judge)(make_sample("a", seed=10)))
    assert (judge.given["max_new_tokens"], judge.given["temperature"]) == (7, 0.25)


class SeededJudge(ExampleJudge):
    """Answers with a score only from the third seed on."""

    async def generate(self, prompt: Any, *, sampling_seed: int = 0, **_: Any) -> str:
        return "Score: 4" if sampling_seed >= 12 else f"no score of seed {sampling_seed}"


def test_an_answer_without_a_score_is_asked_for_with_another_seed(make_sample: Callable[..., Sample]) -> None:
    reward, sample = JudgeReward(JudgeConfig(), SeededJudge()), make_sample("a", seed=10)
    for seed in (10, 11):
        with pytest.raises(JudgeAnswerError, match=f"no score of seed {seed}"):
            asyncio.run(reward(sample))
    assert asyncio.run(reward(sample)) == 4.0
    assert sample.metadata == {"judge_answer": "Score: 4", "judge_invalid_answers": 2}


def test_a_judge_needs_a_process_and_engines() -> None:
    config = RewardConfig(type=RewardType.judge)
    with pytest.raises(ConfigError, match=r"^reward\.engine\.num_gpus must be at least 1 with judge"):
        prepare_reward(config)
    config.engine = RewardEngineConfig(num_gpus=1)
    spec = prepare_reward(config)
    assert isinstance(spec, RewardSpec) and spec.max_cpu_s is None
    row = prepare_reward(RewardConfig(type=RewardType.f1, engine=config.engine), row_types=["judge"])
    assert isinstance(row, RewardSpec)


def test_a_reward_gets_the_judge_by_its_parameter_or_with_others(make_sample: Callable[..., Sample]) -> None:
    config, judge = RewardConfig(custom_path=f"{__name__}:own", engine=RewardEngineConfig(num_gpus=1)), ExampleJudge()
    reward = load_reward(config, judge=judge)
    assert asyncio.run(reward(make_sample("a"))) == 0.5  # type: ignore[arg-type]
    assert judge.texts == ["a"]


async def own(sample: Sample, judge: ExampleJudge) -> float:
    (value,) = await judge.score([sample.response])
    return value
