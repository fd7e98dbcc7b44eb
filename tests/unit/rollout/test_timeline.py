"""Timelines of trajectories: gaps are waits, a page keeps whole groups, memory is bounded."""

import pytest

from rlscale.rollout.timeline import EXCERPT, MAX_SPANS, SpanKind, Timeline, Timelines, TimelineSpan, excerpt
from rlscale.types import Group, Prompt, Sample, SampleStatus

PROMPT = Prompt(index=7, text="1+1=", token_ids=(1, 2))


def group_of(index: int, size: int = 2) -> Group:
    samples = [
        Sample(index=index * size + j, group_index=index, prompt=PROMPT, seed=0, reward=float(j), response="2")
        for j in range(size)
    ]
    for sample in samples:
        sample.append([3], logprobs=[-0.1], weight_versions=[4])
        sample.status = SampleStatus.completed
    return Group(index=index, prompt=PROMPT, samples=samples)


def test_gaps_are_the_parts_without_a_span() -> None:
    timeline = Timeline(drawn_s=0.0)
    for span in (TimelineSpan(SpanKind.grade, 6.0, 7.0), TimelineSpan(SpanKind.generate, 1.0, 3.0)):
        timeline.add(span)
    timeline.add(TimelineSpan(SpanKind.generate, 2.0, 4.0))  # concurrent
    assert timeline.gaps(0.0, 9.0) == [(0.0, 1.0), (4.0, 6.0), (7.0, 9.0)]
    assert timeline.gaps(2.0, 5.0) == [(4.0, 5.0)]
    timeline.close(9.0)
    assert timeline.seconds() == {
        SpanKind.queue: 5.0,
        SpanKind.generate: 4.0,
        SpanKind.tool: 0.0,
        SpanKind.grade: 1.0,
    }


def test_a_long_timeline_grows_its_last_span() -> None:
    timeline = Timeline(drawn_s=0.0)
    for i in range(MAX_SPANS + 10):
        timeline.add(TimelineSpan(SpanKind.tool if i % 2 else SpanKind.generate, float(i), i + 1.0))
    assert len(timeline.spans) == MAX_SPANS
    assert timeline.spans[-1] == TimelineSpan(SpanKind.tool, MAX_SPANS - 1.0, MAX_SPANS + 10.0)


def test_a_page_has_the_sums_of_all_and_the_spans_of_whole_groups() -> None:
    timelines = Timelines(num_kept=4)
    for index in range(6):
        timelines.open([2 * index, 2 * index + 1])
        track = timelines.track([2 * index])
        track.add(SpanKind.generate, 10.0 + index, 12.0 + index)
        timelines.close(group_of(index), "trained")
    page = timelines.close_page()
    assert page.num_groups == 6
    # The group that ended last is kept, because others waited for it.
    assert [group["group"] for group in page.groups] == [2, 5]
    assert [len(group["trajectories"]) for group in page.groups] == [2, 2]
    assert page.metrics["trajectory/generate_s_max"] == pytest.approx(2.0)
    assert page.metrics["trajectory/generate_s_mean"] == pytest.approx(1.0)
    assert "trajectory/tool_s_mean" not in page.metrics
    record = page.groups[0]["trajectories"][1]
    assert (record["id"], record["reward"], record["text"], record["versions"]) == (5, 1.0, "2", [4])
    assert page.to_json(3)["step"] == 3
    assert timelines.close_page().groups == []


def test_few_dropped_groups_are_kept() -> None:
    timelines = Timelines(num_kept=4)
    for index in range(50):
        timelines.open([2 * index, 2 * index + 1])
        timelines.close(group_of(index), "dropped/equal_rewards")
    page = timelines.close_page()
    assert page.num_groups == 50 and len(page.groups) == 2
    assert {group["outcome"] for group in page.groups} == {"dropped/equal_rewards"}


def test_without_kept_groups_there_are_only_sums() -> None:
    timelines = Timelines(num_kept=0)
    timelines.open([0, 1])
    timelines.track([0]).retry()
    timelines.track([0, 1, 99]).add(SpanKind.grade, 1.0, 2.0)  # 99 is of no open trajectory
    timelines.close(group_of(0), "trained")
    page = timelines.close_page()
    assert page.groups == [] and page.metrics["trajectory/retries"] == 1.0
    assert not timelines.has_open([0, 1])


def test_an_excerpt_has_both_ends() -> None:
    text = "a" * 1000 + "b" * 1000
    assert excerpt("short") == "short"
    assert excerpt(text) == "a" * EXCERPT + " ... " + "b" * EXCERPT
