"""Output of the control loop: metrics to sinks, progress to the console, samples to files, warnings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlscale.observe.console import Console
from rlscale.observe.dumps import BatchDump, RolloutDump
from rlscale.observe.evaluation_files import EvaluationFiles
from rlscale.observe.metrics.combined_sink import CombinedSink
from rlscale.observe.rollout_log import RolloutLog
from rlscale.observe.step_lines import StepLines
from rlscale.protocols import MetricSink
from rlscale.types import Float32, Group, TrainBatch, TrainResult, WeightVersion

_DIFF_WARN = {"float32": 1e-4, "bfloat16": 0.05}
"""Limit of the mean |trainer - engine| logprob difference by dtype. Correct runs stay well below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFiles:
    """Files that receive the samples of every rollout. None: not written."""

    dump: RolloutDump | None = None
    batches: BatchDump | None = None
    rollouts: RolloutLog | None = None
    ledger: StepLines | None = None  # outcomes of trajectories
    timelines: StepLines | None = None  # of some trajectories
    evaluations: EvaluationFiles | None = None

    @property
    def lines(self) -> list[RolloutLog | StepLines]:
        """Files of lines, which a resumed run continues."""
        return [each for each in (self.rollouts, self.ledger, self.timelines) if each is not None]


CONSTANT_ROLLOUTS = 5
"""Rollouts in a row with equal rewards, in the rollout or in each of its groups, before a warning."""


class Observer:
    """Receives everything a run reports. The loop calls it; it never calls back."""

    def __init__(
        self,
        *,
        console: Console,
        sinks: Sequence[MetricSink],
        diff_limit: float,
        files: RolloutFiles | None = None,
        learns_from_differences: bool = False,
        expects_equal_rewards: bool = False,
    ) -> None:
        """Opens nothing; the sinks and files are open.

        Args:
            learns_from_differences: a group whose rewards are all equal has no gradient.
            expects_equal_rewards: the reward is the same for every sample by design, which is no warning.
        """
        self.console, self._sink, self._diff_limit = console, CombinedSink(sinks), diff_limit
        self._files = files or RolloutFiles()
        self.warnings: list[str] = []
        self._num_constant = 0  # rollouts in a row with one and the same reward
        self._num_flat = 0  # rollouts in a row without a group that has a gradient
        self._learns_from_differences, self._expects_equal_rewards = learns_from_differences, expects_equal_rewards

    @property
    def evaluations(self) -> EvaluationFiles | None:
        """The files of evaluations, which the evaluator writes."""
        return self._files.evaluations

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Records the metrics of a whole rollout."""
        self._sink.log(metrics, step=step)
        self.console.step(step, metrics)
        self._check_logprob_diff(metrics, step=step)
        self._check_rewards(metrics, step=step)

    @property
    def wants_columns(self) -> bool:
        """Whether the trainer returns its token columns, for a dump."""
        return self._files.batches is not None

    def choose_logprob_samples(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Selects the samples whose logprobs the trainer returns, for `TrainBatch.logprob_samples`."""
        if self._files.batches is not None:
            return tuple(range(sum(len(group.samples) for group in groups)))
        return () if self._files.rollouts is None else self._files.rollouts.choose(groups)

    def trained(self, rollout_id: int, groups: Sequence[Group], *, batch: TrainBatch, result: TrainResult) -> None:
        """Records the samples of a finished training phase, their batch, and what the trainer returned of them."""
        if self._files.batches is not None:
            self._files.batches.write(rollout_id, batch, logprobs=result.logprobs, columns=result.columns)
        self.generated(rollout_id, groups, version=batch.version, logprobs=result.logprobs)

    def generated(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        *,
        version: WeightVersion,
        logprobs: Mapping[int, Float32] | None = None,
    ) -> None:
        """Records complete samples. Without a trainer the engine's logprobs are the only ones."""
        if self._files.dump is not None:
            self._files.dump.write(rollout_id, groups, version=version)
        if self._files.rollouts is not None:
            chosen = self._files.rollouts.choose(groups)
            if logprobs is None:
                lengths = [sample.response_len for group in groups for sample in group.samples]
                logprobs = {index: np.full(lengths[index], np.nan, np.float32) for index in chosen}
            kept = {index: values for index, values in logprobs.items() if index in chosen}
            self._files.rollouts.write(rollout_id, groups, logprobs=kept)

    def ledger(self, page: Mapping[str, Any]) -> None:
        """Records the outcomes of a rollout's trajectories."""
        if self._files.ledger is not None:
            self._files.ledger.append([page])

    def timelines(self, page: Mapping[str, Any]) -> None:
        """Records when some of a rollout's trajectories were generated and graded."""
        if self._files.timelines is not None:
            self._files.timelines.append([page])

    def evaluated(self, metrics: Mapping[str, float], *, step: int, num_done: int | None = None) -> None:
        """Records the metrics of an evaluation that is not part of a step's record.

        It ran before the first rollout, after the last, or concurrently with one.

        Args:
            step: the step of the record in the sinks.
            num_done: number of rollouts before it, for the console. None: `step`.
        """
        self._sink.log(metrics, step=step)
        self.console.evaluated(step if num_done is None else num_done, metrics)

    def _check_logprob_diff(self, metrics: Mapping[str, float], *, step: int) -> None:
        diff = metrics.get("logprob_diff/mean", 0.0)
        if diff > self._diff_limit:
            # The sync at the end of the step has already incremented weights/version.
            version = metrics.get("weights/version", 0.0) - 1
            self.warn(
                f"rollout {step}: trainer and engine logprobs differ by {diff:.2g} on average under weight version "
                f"{version:.0f} (expected at most {self._diff_limit:.2g}): the samples are not from the trained "
                "policy; check for stale weights, another dtype, or sampling parameters that the trainer does not apply"
            )

    def _check_rewards(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Warns once about rewards that are all equal, in the rollout or in each group: there is no gradient."""
        if self._expects_equal_rewards:
            return
        self._num_constant = self._num_constant + 1 if metrics.get("reward/std") == 0 else 0
        if self._num_constant == CONSTANT_ROLLOUTS:
            self.warn(
                f"rollouts {step - CONSTANT_ROLLOUTS + 1} to {step}: every reward is {metrics['reward/mean']:g}, so "
                "that there is nothing to learn from rewards; read some responses in samples.jsonl, and check the "
                "reward and the labels"
            )
        # Each group has one reward, and not all groups the same: a task that is solved or out of reach, by prompt.
        is_flat = self._learns_from_differences and metrics.get("reward/flat_groups") == 1 and not self._num_constant
        self._num_flat = self._num_flat + 1 if is_flat else 0
        if self._num_flat == CONSTANT_ROLLOUTS:
            self.warn(
                f"rollouts {step - CONSTANT_ROLLOUTS + 1} to {step}: all groups are flat (reward/flat_groups=1): the "
                "samples of each prompt have equal rewards, so that nothing is learned; use prompts of other "
                "difficulty, more samples per prompt (batch.n_samples_per_prompt), or a reward with intermediate values"
            )

    def rewind(self, step: int) -> None:
        """Removes records of `step` and later: the run resumes from an earlier checkpoint and reports them again."""
        self._sink.rewind(step)
        for lines in self._files.lines:
            lines.rewind(step)
        if self._files.evaluations is not None:
            self._files.evaluations.rewind(step)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.console.warning(text)

    def close(self) -> None:
        for lines in self._files.lines:
            lines.close()
        self._sink.close()


def diff_limit(configured: float | None, dtype: str, *, samples_otherwise: bool = False) -> float:
    """`debug.logprob_diff_warn`, or the default limit of `dtype`.

    Args:
        samples_otherwise: engines have low-precision weights, or tokens may use a KV cache of older weights, which the
            trainer cannot reproduce. There is no default limit then.
    """
    if configured is not None:
        return configured
    return float("inf") if samples_otherwise else _DIFF_WARN[dtype]
