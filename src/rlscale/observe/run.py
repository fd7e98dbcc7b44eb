"""What the control loop tells the world: metrics to the sinks, progress to the console, alarms to both."""

from collections.abc import Mapping, Sequence

from rlscale.observe.console import Console
from rlscale.observe.dumps import RolloutDump
from rlscale.observe.metrics import CombinedSink
from rlscale.observe.rollouts import RolloutLog
from rlscale.protocols import MetricSink
from rlscale.types import Float32, Group, WeightVersion

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
        rollouts: RolloutLog | None = None,
    ) -> None:
        self.console, self._sink, self._dump, self._rollouts = console, CombinedSink(sinks), dump, rollouts
        self._diff_limit = diff_limit
        self.warnings: list[str] = []

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Metrics of a whole rollout."""
        self._sink.log(metrics, step=step)
        self.console.step(step, metrics)
        self._check_logprob_diff(metrics, step=step)

    def asked(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """The samples whose logprobs the trainer is to give back, for `TrainBatch.asked`."""
        return () if self._rollouts is None else self._rollouts.choose(groups)

    def trained(
        self, rollout_id: int, groups: Sequence[Group], *, version: WeightVersion, logprobs: Mapping[int, Float32]
    ) -> None:
        """The samples that weights of `version` were just trained on, and the logprobs of the asked ones."""
        if self._dump is not None:
            self._dump.write(rollout_id, groups, version=version)
        if self._rollouts is not None:
            self._rollouts.write(rollout_id, groups, logprobs=logprobs)

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


def diff_limit(configured: float | None, dtype: str) -> float:
    """`debug.logprob_diff_warn`, or the level that separates healthy from sick runs in `dtype`."""
    return _DIFF_WARN[dtype] if configured is None else configured
