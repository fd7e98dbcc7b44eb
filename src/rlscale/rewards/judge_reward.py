"""The built-in judge, `reward.type=judge`: a number that the model of `reward.engine` writes about a response."""

import re

from rlscale.config.groups.judge import JudgeConfig
from rlscale.hook_protocols import Judge
from rlscale.types import Sample

JUDGE = "judge"
"""Name of the built-in reward."""

INVALID = "judge_invalid_answers"
"""Number of answers without a score, in the sample's metadata."""

MAX_SHOWN = 200


class JudgeAnswerError(ValueError):
    """The answer of the judge has no valid score."""


class JudgeReward:
    """Asks the judge about one sample.

    Args:
        judge: None: only the config is checked, no sample is scored.

    Example:
        reward = JudgeReward(JudgeConfig(prompt="Rate from 0 to 10: {response}"), judge)
        score = await reward(sample)
    """

    def __init__(self, config: JudgeConfig, judge: Judge | None) -> None:
        self._config, self._judge = config, judge

    async def __call__(self, sample: Sample) -> float:
        """Returns the score. Adds the judge's answer to the sample's metadata, as `judge_answer`.

        The answer is drawn by the sample's seed, with another one after each answer without a score, so that an engine
        that draws by seed repeats it after a restart of the run.

        Raises:
            JudgeAnswerError: the answer has no score, or one outside the valid range.
        """
        config = self._config
        assert self._judge is not None, "only a process of rewards calls it"
        question = config.prompt.format(
            prompt=sample.prompt.text, response=sample.answer, label=sample.prompt.label_text or ""
        )
        num_invalid = sample.metadata.get(INVALID, 0)
        answer = await self._judge.generate(
            [{"role": "user", "content": question}],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            sampling_seed=sample.seed + num_invalid,
        )
        sample.metadata["judge_answer"] = answer
        try:
            return read_score(answer, config)
        except JudgeAnswerError:
            sample.metadata[INVALID] = num_invalid + 1
            raise


def read_score(answer: str, config: JudgeConfig) -> float:
    """The last score in an answer.

    Raises:
        JudgeAnswerError: there is none, or it is outside the valid range.
    """
    end = answer if len(answer) <= MAX_SHOWN else f"...{answer[-MAX_SHOWN:]}"
    found = [match.group(1) for match in re.finditer(config.pattern, answer)]
    if not found:
        raise JudgeAnswerError(f"the judge's answer must match reward.judge.pattern={config.pattern!r}, got {end!r}")
    try:
        score = float(found[-1])
    except (TypeError, ValueError):
        raise JudgeAnswerError(
            f"the group of reward.judge.pattern must match a number, got {found[-1]!r} in {end!r}"
        ) from None
    if not config.min_score <= score <= config.max_score:
        limits = f"reward.judge.min_score={config.min_score:g} to max_score={config.max_score:g}"
        raise JudgeAnswerError(f"the judge's score must be in {limits}, got {score:g} in {end!r}")
    return score
