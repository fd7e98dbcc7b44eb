"""Failures of a tracker do not end the run."""

from rlscale.observe.trackers.open_trackers import GuardedTracker
from rlscale.protocols import Metrics


class Flaky:
    """Sink that fails at one step and on close. Records the steps it gets."""

    def __init__(self, *, fail_at: int | None) -> None:
        self.steps: list[int] = []
        self._fail_at = fail_at

    def log(self, metrics: Metrics, *, step: int) -> None:
        if step == self._fail_at:
            raise ConnectionError("the service is\ngone")
        self.steps.append(step)

    def rewind(self, step: int) -> None:
        self.steps = [logged for logged in self.steps if logged < step]

    def close(self) -> None:
        raise TimeoutError("uploading")


def test_the_first_failure_warns_and_disables_the_tracker() -> None:
    warnings: list[str] = []
    flaky = Flaky(fail_at=2)
    tracker = GuardedTracker(flaky, name="wandb", warn=warnings.append)
    for step in range(5):
        tracker.log({"train/loss": 1.0}, step=step)
    tracker.close()
    assert flaky.steps == [0, 1]
    assert warnings == [
        "wandb failed at rollout 2 and receives no more metrics; metrics.jsonl has all of them; "
        "ConnectionError: the service is gone"
    ]


def test_calls_are_passed_on_and_a_failing_close_warns() -> None:
    warnings: list[str] = []
    flaky = Flaky(fail_at=None)
    tracker = GuardedTracker(flaky, name="wandb", warn=warnings.append)
    for step in range(3):
        tracker.log({}, step=step)
    tracker.rewind(1)
    assert flaky.steps == [0]
    tracker.close()
    assert warnings == [
        "wandb failed at the end and receives no more metrics; metrics.jsonl has all of them; TimeoutError: uploading"
    ]
