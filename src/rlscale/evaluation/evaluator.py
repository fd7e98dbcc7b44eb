"""Rewards on held-out prompts, with the weights that the engines hold now.

Trajectories that failed are retried as in training. Those that fail again leave the means, and are counted. A finished
group is measured, written to the run folder, and forgotten: memory does not grow with the number of samples.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from rlscale.config import RunConfig
from rlscale.evaluation.load_sets import EvalSet
from rlscale.evaluation.measure import SetMeasure
from rlscale.evaluation.sft_loss import HeldOutLoss
from rlscale.observe.evaluation_files import EvaluationFiles, EvaluationWriter, Measured
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.grading import Scorer
from rlscale.rollout.group_generator import Generate, GroupGenerator, GroupSettings
from rlscale.types import Failure, FailureCause, Group, Prompt, SampleStatus, WeightVersion

EvalLog = Callable[[WeightVersion, Mapping[str, Sequence[Group]], dict[str, float]], Awaitable[dict[str, float]]]

EvalDump = Callable[[WeightVersion, Mapping[str, Sequence[Group]]], None]
"""Writes the samples of an evaluation, failed ones included, by set."""

MAX_SAMPLES_IN_FLIGHT = 8192
"""Samples of an evaluation that are requested at once: more than engines run, and few enough to keep in memory."""

MAX_ABORTS = 64
"""Times that a group is continued after an abort; updates abort a long answer often."""


class Evaluator:
    """Has every prompt of every set answered, and returns means.

    Seeds depend on the row alone, so that two evaluations of the same weights return the same numbers.

    Args:
        sessions: makes the requests of a set.
        rewards: scores the samples of a set.
        held_out: loss that the trainer measures in addition; None: rewards only.
        generate: function of the user for a set; None: one request for each sample.
    """

    def __init__(
        self,
        *,
        sets: Sequence[EvalSet],
        sessions: Callable[[EvalSet], SessionFactory],
        rewards: Callable[[EvalSet], Scorer],
        config: RunConfig,
        held_out: HeldOutLoss | None = None,
        generate: Callable[[EvalSet], Generate | None] | None = None,
    ) -> None:
        self._log: EvalLog | None = None
        self._files: EvaluationFiles | None = None
        self._dump: EvalDump | None = None
        self._held_out, self._max_failed_share = held_out, config.sampling.max_failed_share
        batch, own = config.batch, config.eval
        self._max_concurrency = own.max_concurrency or batch.rollout_batch_size * batch.n_samples_per_prompt
        self._spans_versions = own.max_weight_versions != 1
        self._sets = [
            (
                each,
                GroupGenerator(
                    sessions(each),
                    rewards(each),
                    GroupSettings(
                        num_samples=each.num_samples,
                        reward_key=each.reward_key,
                        max_retries=config.sampling.max_retries,
                        generate=None if generate is None else generate(each),
                        source=f"the evaluation set {each.name}",
                    ),
                ),
            )
            for each in sets
        ]

    def set_log(self, log: EvalLog) -> None:
        """Calls the user's log function, which returns the metrics of rewards that are logged."""
        self._log = log

    def keep_samples(self, files: EvaluationFiles) -> None:
        """Writes the samples of every evaluation to files."""
        self._files = files

    def set_dump(self, dump: EvalDump) -> None:
        """Writes the samples of every evaluation, in a thread."""
        self._dump = dump

    async def run(
        self, version: WeightVersion, measured: Measured | None = None, *, concurrent: bool = False
    ) -> dict[str, float]:
        """`eval/<set>/...` for every set; `eval/reward_mean`, the mean over the sets; `eval/weight_version`.

        Args:
            version: of the engines' weights. A token of another version ends the run; in a concurrent evaluation
                without `eval.max_weight_versions=1`, one of an older version.
            measured: the weights as the record names them; None: `version` of this run.
            concurrent: rollouts need the engines, too.

        Raises:
            FailureShareError: more than `sampling.max_failed_share` of a set failed.
        """
        measured = measured or Measured.of_run(version, num_rollouts=version)
        about = {each.name: dict(each.about or {}) for each, _ in self._sets}
        writer = None if self._files is None else await asyncio.to_thread(self._files.open, measured, about)
        try:
            shift = measured.version - version
            metrics, by_set = await self._measure(version, writer, concurrent=concurrent, shift=shift)
            metrics["eval/weight_version"] = float(measured.version)
            if writer is not None:
                await asyncio.to_thread(writer.commit, metrics)
        except BaseException:
            if writer is not None:
                writer.discard()
            raise
        if self._log is not None:
            metrics = await self._log(measured.version, by_set, metrics)
        return metrics | (await self._held_out.run(version) if self._held_out is not None else {})

    async def _measure(
        self, version: WeightVersion, writer: EvaluationWriter | None, *, concurrent: bool, shift: int
    ) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """Metrics of all sets, and their groups if a log function needs them.

        Args:
            shift: from the version of the engines to that of the record: engines that load a checkpoint begin at 0.
        """
        metrics: dict[str, float] = {}
        by_set: dict[str, list[Group]] = {}
        newest = None if concurrent and self._spans_versions else version
        limit = self._max_concurrency if concurrent else MAX_SAMPLES_IN_FLIGHT
        for eval_set, generator in self._sets:
            keeps_groups = self._log is not None or self._dump is not None
            measure = SetMeasure(spans_versions=newest is None)
            found = _SetResult(eval_set.name, writer, measure, keeps_groups=keeps_groups, shift=shift)
            await self._generate(eval_set, generator, (version, newest), found, limit=limit)
            by_set[eval_set.name] = [group for _, group in sorted(found.groups.items())]
            metrics |= {f"eval/{eval_set.name}/{key}": value for key, value in found.measure.metrics().items()}
        if self._dump is not None:
            await asyncio.to_thread(self._dump, version, by_set)
        metrics["eval/reward_mean"] = fmean(metrics[f"eval/{each.name}/reward_mean"] for each, _ in self._sets)
        return metrics, by_set

    async def _generate(
        self,
        eval_set: EvalSet,
        generator: GroupGenerator,
        versions: tuple[WeightVersion, WeightVersion | None],
        result: "_SetResult",
        *,
        limit: int,
    ) -> None:
        """Has every prompt of a set answered, at most `limit` samples at once."""
        total = len(eval_set.prompts) * eval_set.num_samples
        # A set without any reward has no mean, whatever the limit.
        max_share = min(self._max_failed_share, (total - 1) / total)
        watch = FailureWatch(max_share=max_share, least=total, where=f"the evaluation set {eval_set.name}")
        prompts = iter(enumerate(eval_set.prompts))

        async def generate() -> None:
            # Each of these tasks takes the next prompt until there is none.
            for index, prompt in prompts:
                group = await _finished_group(generator, index, prompt, versions)
                watch.add(group)
                await result.add(index, group)

        num_tasks = max(1, limit // eval_set.num_samples)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(num_tasks, len(eval_set.prompts))):
                tasks.create_task(generate())


async def _finished_group(
    generator: GroupGenerator, index: int, prompt: Prompt, versions: tuple[WeightVersion, WeightVersion | None]
) -> Group:
    """A group whose samples are finished or failed: an update with `rollout.pause_mode=abort` cuts answers off."""
    group = await generator.run(index, prompt, versions=versions)
    for _ in range(MAX_ABORTS):
        if not _is_unfinished(group):
            return group
        group = await generator.run(index, prompt, versions=versions, before=group)
    failure = Failure(cause=FailureCause.model_server, message=f"its requests were aborted {MAX_ABORTS} times")
    for sample in group.samples:
        sample.status, sample.failure = SampleStatus.failed, failure
    return replace(group, samples=[], failed=[*group.samples, *group.failed])


def _is_unfinished(group: Group) -> bool:
    return any(sample.status in (SampleStatus.pending, SampleStatus.aborted) for sample in group.samples)


class _SetResult:
    """The metrics of a set, and its samples in a file, from its finished groups."""

    def __init__(
        self, name: str, writer: EvaluationWriter | None, measure: SetMeasure, *, keeps_groups: bool, shift: int
    ) -> None:
        self._name, self._writer, self._keeps_groups, self._shift = name, writer, keeps_groups, shift
        self.measure = measure
        self.groups: dict[int, Group] = {}  # by prompt; empty unless `keeps_groups`

    async def add(self, index: int, group: Group) -> None:
        if self._shift:
            for sample in (*group.samples, *group.failed):
                sample.weight_versions = sample.weight_versions + np.int32(self._shift)
        self.measure.add(group)
        if self._keeps_groups:
            self.groups[index] = group
        if self._writer is not None:
            # In a thread: a group of long samples takes a while to encode, which must not block training.
            await asyncio.to_thread(self._writer.add, self._name, group)
