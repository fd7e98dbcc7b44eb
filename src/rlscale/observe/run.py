"""What the control loop tells the world: metrics to the sinks, progress to the console, alarms to both."""

from collections.abc import Mapping, Sequence

from rlscale.observe.console import Console
from rlscale.observe.metrics import CombinedSink
from rlscale.protocols import MetricSink

_DIFF_WARN = {"float32": 1e-4, "bfloat16": 0.05}
"""Mean |trainer - engine| logprob difference above which something is wrong, by dtype; healthy runs stay well below."""


class Observer:
    """One place for everything a run reports. The loop calls it; it never calls back."""

    def __init__(self, *, console: Console, sinks: Sequence[MetricSink], interval: int, diff_limit: float) -> None:
        self.console, self._sink = console, CombinedSink(sinks)
        self._interval, self._diff_limit = interval, diff_limit
        self.warnings: list[str] = []

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Metrics of a whole rollout. `logging.interval` thins the sinks, never the console and never an evaluation."""
        evaluated = any(name.startswith("eval/") for name in metrics)
        if step % self._interval == 0 or evaluated:
            self._sink.log(metrics, step=step)
        self.console.step(step, metrics)
        self._check_logprob_diff(metrics, step=step)

    def evaluated(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Metrics of an evaluation before the first or after the last rollout."""
        self._sink.log(metrics, step=step)
        self.console.evaluated(step, metrics)

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

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.console.warning(text)

    def close(self) -> None:
        self._sink.close()


def diff_limit(configured: float | None, dtype: str) -> float:
    """`debug.logprob_diff_warn`, or the level that separates healthy from sick runs in `dtype`."""
    return _DIFF_WARN[dtype] if configured is None else configured
