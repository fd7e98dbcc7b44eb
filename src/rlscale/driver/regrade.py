"""New rewards for the kept samples of a run's evaluations, without a model or an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlscale.config import RewardType, RunConfig
from rlscale.config.resolve.eval_sets import EvalSetConfig, eval_sets
from rlscale.driver.open_rewards import reward_limits
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.evaluation.load_sets import prepare_set_reward, reward_name, with_metadata
from rlscale.evaluation.measure import SetMeasure
from rlscale.observe.evaluation_files import (
    REGRADE,
    EvaluationWriter,
    Measured,
    find_evaluations,
    read_about,
    read_group,
    read_records,
)
from rlscale.plugins.args_view import Args
from rlscale.rewards import RewardRunner, RunReward, find_row_types, prepare_reward
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.grading import grade_group
from rlscale.types import Group, Prompt

MAX_GROUPS = 64
"""Groups that are graded at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrade:
    """The metrics of an evaluation before and after."""

    folder: Path
    version: int
    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptSet:
    """A set of a kept evaluation, with its present settings."""

    file: Path
    about: Mapping[str, Any]
    config: EvalSetConfig
    reward: RunReward
    weights: Mapping[str, float]
    num_groups: int

    def groups(self, version: int) -> Iterator[Group]:
        for record in read_records(self.file):
            group = read_group(record, version=version)
            group.prompt = with_metadata(group.prompt, self.config)
            for sample in (*group.samples, *group.failed):
                sample.prompt = with_metadata(sample.prompt, self.config)
            yield group


def regrade_run(folder: Path, config: RunConfig) -> list[Regrade]:
    """Grades every kept evaluation of a run again, and writes each next to the original.

    Args:
        folder: run folder.
        config: of the run, with the rewards to compute.

    Raises:
        ConfigError, DataError: there is no evaluation, or a reward, set or file cannot be used.
        RewardError, FailureShareError: too many rewards failed.
    """
    evaluations = [path for path in find_evaluations(folder) if not path.name.endswith(REGRADE)]
    if not evaluations:
        fix = "it has no samples in evaluations/; evaluate with eval.keep_last=null"
        raise ConfigError([_problem("--regrade", "be a run with kept evaluations", str(folder), fix)])
    # All of them are checked before the first one is graded.
    prepared = [(path, read_about(path), _find_sets(path, config)) for path in evaluations]
    return [_regrade(path, about, sets, config) for path, about, sets in prepared]


def _find_sets(evaluation: Path, config: RunConfig) -> dict[str, _KeptSet]:
    known, kept = {each.name: each for each in eval_sets(config.eval)}, read_about(evaluation)["sets"]
    if missing := [name for name in kept if name not in known]:
        rule = f"contain the sets that {evaluation} has kept"
        fix = f"add {', '.join(missing)}, or name the sets as before"
        key = "eval.prompt_data" if config.eval.config is None else "eval.config"
        raise ConfigError([_problem(key, rule, ", ".join(known) or "no set", fix)])
    return {name: _find_set(evaluation / about["file"], about, known[name], config) for name, about in kept.items()}


def _find_set(file: Path, about: Mapping[str, Any], each: EvalSetConfig, config: RunConfig) -> _KeptSet:
    args, own = Args(config), each.reward(config.reward)
    prompts = [with_metadata(_prompt(record), each) for record in read_records(file)]
    if not prompts:
        raise DataError(f"{file} must hold the samples of an evaluation, got none; evaluate again")
    reward, types = prepare_set_reward(each, config, args=args), {own.type if own is not None else config.reward.type}
    if reward is None:
        rows = find_row_types(prompts, source=str(file)) if config.reward.custom_path is None else frozenset()
        types |= {RewardType(name) for name in rows}
        reward = prepare_reward(config.reward, custom=config.custom, args=args, row_types=rows)
    if RewardType.judge in types or RewardType.judge in config.reward.functions.values():
        fix = "choose a reward without a judge; evaluate again to ask one"
        raise ConfigError(
            [_problem("reward.type", "not be judge with --regrade, which starts no engine", "judge", fix)]
        )
    weights = config.reward.weights if own is None else {}
    return _KeptSet(file=file, about=about, config=each, reward=reward, weights=weights, num_groups=len(prompts))


def _prompt(record: Mapping[str, Any]) -> Prompt:
    """The prompt of a line without its tokens, for the rewards that rows name."""
    return Prompt(index=record["row"], text="", token_ids=(), label=None, metadata=record["metadata"])


def _regrade(evaluation: Path, about: Mapping[str, Any], sets: Mapping[str, _KeptSet], config: RunConfig) -> Regrade:
    measured = Measured(version=about["version"], num_rollouts=about["num_rollouts"], weights=about["weights"])
    settings = {name: {**each.about, "reward": reward_name(each.config, config)} for name, each in sets.items()}
    target = evaluation.with_name(f"{evaluation.name}{REGRADE}")
    writer = EvaluationWriter(target, measured, settings, about={"regrade_of": evaluation.name})
    try:
        metrics: dict[str, float] = {}
        for name, each in sets.items():
            measure = asyncio.run(_grade_set(name, each, config, writer, version=measured.version))
            metrics |= {f"eval/{name}/{key}": value for key, value in measure.metrics().items()}
        metrics["eval/reward_mean"] = fmean(metrics[f"eval/{name}/reward_mean"] for name in sets)
        metrics["eval/weight_version"] = float(measured.version)
        writer.commit(metrics)
    except BaseException:
        writer.discard()
        raise
    return Regrade(folder=target, version=measured.version, before=about["metrics"], after=metrics)


async def _grade_set(
    name: str, each: _KeptSet, config: RunConfig, writer: EvaluationWriter, *, version: int
) -> SetMeasure:
    measure, groups, source = SetMeasure(), each.groups(version), f"the evaluation set {name}"
    total = each.num_groups * int(each.about.get("num_samples") or 1)
    limit = min(config.sampling.max_failed_share, (total - 1) / total)
    watch = FailureWatch(max_share=limit, least=total, where=source)
    runner = RewardRunner(
        each.reward,
        limits=reward_limits(config.reward),
        max_retries=config.reward.max_retries,
        weights=each.weights,
        source=source,
    )

    async def grade() -> None:
        # Each of these tasks takes the next group until there is none.
        for group in groups:
            await grade_group(group, runner, key=each.config.eval.reward_key)
            watch.add(group)
            measure.add(group)
            writer.add(name, group)

    with runner:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(MAX_GROUPS, each.num_groups)):
                tasks.create_task(grade())
    return measure


def _problem(path: str, rule: str, value: str, fix: str) -> Problem:
    return Problem(path=path, rule=rule, value=value, fix=fix)
