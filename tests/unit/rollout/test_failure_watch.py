"""Share of failed trajectories above which a run stops."""

import pytest

from rlscale.errors import FailureShareError
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus

PROMPT = Prompt(index=0, text="", token_ids=(1,))


def make_group(*, good: int, failed: int, cause: FailureCause = FailureCause.grader) -> Group:
    samples = [Sample(index=i, group_index=0, prompt=PROMPT, seed=0) for i in range(good + failed)]
    for sample in samples[good:]:
        sample.status, sample.failure = SampleStatus.failed, Failure(cause=cause, message=f"{cause} broke")
    return Group(index=0, prompt=PROMPT, samples=samples[:good], failed=samples[good:])


def test_failures_up_to_the_share_stop_nothing() -> None:
    watch = FailureWatch(max_share=0.5, least=4)
    for _ in range(20):
        watch.add(make_group(good=2, failed=2))
    # Half of 80 failed, which is the limit; one more is above it.
    with pytest.raises(FailureShareError, match="41 of 81"):
        watch.add(make_group(good=0, failed=1))


def test_the_message_names_the_commonest_cause() -> None:
    watch = FailureWatch(max_share=0.5, least=4)
    watch.add(make_group(good=2, failed=1, cause=FailureCause.tool))
    message = r"5 of 7 trajectories .* 4 by cause grader; the last one: grader broke"
    with pytest.raises(FailureShareError, match=message):
        watch.add(make_group(good=0, failed=4))


def test_a_first_failure_is_measured_against_a_whole_rollout() -> None:
    watch = FailureWatch(max_share=0.5, least=8)
    watch.add(make_group(good=0, failed=4))
    with pytest.raises(FailureShareError):
        watch.add(make_group(good=0, failed=1))


def test_the_first_failure_of_each_cause_is_reported_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    watch = FailureWatch(max_share=0.5, least=20)
    for cause in (FailureCause.tool, FailureCause.tool, FailureCause.sandbox, FailureCause.grader):
        watch.add(make_group(good=2, failed=1, cause=cause))
    # Those of graders are reported by the runner of rewards.
    assert [record.message for record in caplog.records] == [
        "tool broke; further failures by cause tool are only counted",
        "sandbox broke; further failures by cause sandbox are only counted",
    ]


def test_only_the_last_rollouts_count() -> None:
    watch = FailureWatch(max_share=0.5, least=4)
    watch.add(make_group(good=4, failed=4))
    for _ in range(3):
        watch.end_rollout()
    # Of 5 trajectories 3 failed; with the failures of the first rollout it were 7 of 13.
    watch.add(make_group(good=2, failed=2))
    with pytest.raises(FailureShareError, match="3 of 5"):
        watch.add(make_group(good=0, failed=1))
