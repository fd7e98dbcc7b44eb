"""What the control loop tells the world: metrics to the sinks, progress to the console, alarms to both."""

from collections.abc import Mapping, Sequence

from rlscale.observe.console import Console
from rlscale.observe.dumps import BatchDump, RolloutDump
from rlscale.observe.metrics.combined_sink import CombinedSink
from rlscale.observe.rollout_log import RolloutLog
from rlscale.protocols import MetricSink
from rlscale.types import Float32, Group, TrainBatch, WeightVersion

_DIFF_WARN = {"float32": 1e-4, "bfloat16": 0.05}
"""Mean |trainer - engine| logprob difference above which something is wrong, by dtype; healthy runs stay well below."""


class Observer:
    """One place for everything a run reports. The loop calls it; it never calls back."""

    def __init__(
        self,
        *,
        console: Console,
        sinks: Sequence[MetricSink],
        diff_limit: float,
        dump: RolloutDump | None = None,
        batches: BatchDump | None = None,
        rollouts: RolloutLog | None = None,
    ) -> None:
        self.console, self._sink, self._dump, self._rollouts = console, CombinedSink(sinks), dump, rollouts
        self._diff_limit, self._batches = diff_limit, batches
        self.warnings: list[str] = []

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Metrics of a whole rollout."""
        self._sink.log(metrics, step=step)
        self.console.step(step, metrics)
        self._check_logprob_diff(metrics, step=step)

    def choose_logprob_samples(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """The samples whose logprobs the trainer is to give back, for `TrainBatch.logprob_samples`."""
        if self._batches is not None:
            return tuple(range(sum(len(group.samples) for group in groups)))
        return () if self._rollouts is None else self._rollouts.choose(groups)

    def trained(
        self, rollout_id: int, groups: Sequence[Group], *, batch: TrainBatch, logprobs: Mapping[int, Float32]
    ) -> None:
        """The samples that were just trained on, as the batch made of them, and the logprobs of the asked ones."""
        if self._batches is not None:
            self._batches.write(rollout_id, batch, logprobs=logprobs)
        self.generated(rollout_id, groups, version=batch.version, logprobs=logprobs)

    def generated(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        *,
        version: WeightVersion,
        logprobs: Mapping[int, Float32] | None = None,
    ) -> None:
        """Samples that are complete; without a trainer there are no logprobs beside the engine's."""
        if self._dump is not None:
            self._dump.write(rollout_id, groups, version=version)
        if self._rollouts is not None:
            chosen = self._rollouts.choose(groups)
            kept = {index: values for index, values in (logprobs or {}).items() if index in chosen}
            self._rollouts.write(rollout_id, groups, logprobs=kept)

    def evaluated(self, metrics: Mapping[str, float], *, step: int, num_done: int | None = None) -> None:
        """Metrics of an evaluation that is reported by itself: before the first rollout, after the last, or beside one.

        Args:
            step: that sinks log them with.
            num_done: rollouts before it, for the console. None: `step`.
        """
        self._sink.log(metrics, step=step)
        self.console.evaluated(step if num_done is None else num_done, metrics)

    def _check_logprob_diff(self, metrics: Mapping[str, float], *, step: int) -> None:
        diff = metrics.get("logprob_diff/mean", 0.0)
        if diff > self._diff_limit:
            version = metrics.get("weights/version", 0.0) - 1
            self.warn(
                f"rollout {step}: trainer and engine logprobs differ by {diff:.2g} on average under weight version "
                f"{version:.0f} (expected at most {self._diff_limit:.2g}): the samples are not from the policy that is "
                "trained; look for stale weights, another dtype, or sampling parameters that the trainer does not know"
            )

    def rewind(self, step: int) -> None:
        """The run goes on from a checkpoint before `step`: what was reported from there on will be reported again."""
        self._sink.rewind(step)
        if self._rollouts is not None:
            self._rollouts.rewind(step)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.console.warning(text)

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        self._sink.close()


def diff_limit(configured: float | None, dtype: str, *, mixes_caches: bool = False) -> float:
    """`debug.logprob_diff_warn`, or the level that separates healthy from sick runs in `dtype`.

    Args:
        mixes_caches: tokens may stand on a cache of older weights, which the trainer has not; no level is sick then.
    """
    if configured is not None:
        return configured
    return float("inf") if mixes_caches else _DIFF_WARN[dtype]
