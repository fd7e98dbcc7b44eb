"""Teachers score finished samples; a failure of one is a value, and never a zero."""

from collections.abc import Sequence

import numpy as np
import pytest

from rlscale.data.batch import build_batch
from rlscale.errors import EngineError
from rlscale.images import Image
from rlscale.rollout.teacher_grading import TeacherChoice, TeacherGrading
from rlscale.teacher_scores import TeacherScores
from rlscale.types import FailureCause, Group, Prompt, Sample, SampleStatus


class CountingTeacher:
    """Gives token t the logprob -t / 10; refuses its first requests."""

    def __init__(self, *, num_failures: int = 0, status: int | None = None, scale: float = 0.1) -> None:
        self.num_failures, self.status, self.scale = num_failures, status, scale
        self.starts: list[int] = []
        self.images: list[tuple[str, ...]] = []

    async def score(self, token_ids: Sequence[int], *, start: int, images: Sequence[Image] = ()) -> TeacherScores:
        self.starts.append(start)
        self.images.append(tuple(image.digest for image in images))
        if len(self.starts) <= self.num_failures:
            raise EngineError("teacher (http://127.0.0.1:9) must answer, got nothing", status=self.status)
        ids = np.asarray(token_ids[start:], np.int32)
        top_ids = np.stack([ids, ids + 1], axis=1)
        logprobs = (-self.scale * ids).astype(np.float32)
        return TeacherScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=np.stack([logprobs, logprobs], axis=1))


def make_group(*, source: str = "math") -> Group:
    prompt = Prompt(index=3, text="ab", token_ids=(1, 2), metadata={"data_source": source})
    samples = [
        Sample(index=j, group_index=0, prompt=prompt, seed=j, status=SampleStatus.completed, reward=1.0)
        for j in range(2)
    ]
    samples[0].append([5, 6], logprobs=[-1, -1], weight_versions=[0, 0])
    # The result of a tool before the answer: its tokens are not trainable and need no logprob.
    samples[1].append([7, 7], logprobs=[0, 0], weight_versions=[0, 0], trainable=False)
    samples[1].append([8, 9], logprobs=[-1, -1], weight_versions=[0, 0])
    return Group(index=0, prompt=prompt, samples=samples)


def grading(teacher: CountingTeacher, *, max_retries: int = 2) -> TeacherGrading:
    return TeacherGrading(TeacherChoice(default=teacher, by_source={}), max_retries=max_retries, backoff_s=0.0)


async def test_logprobs_of_responses_reach_their_rows_of_the_batch() -> None:
    group, teacher = make_group(), CountingTeacher()
    await grading(teacher).grade(group)
    assert sorted(teacher.starts) == [2, 4]  # from the first trainable token on
    batch = build_batch([group], 0)
    assert batch.teacher is not None and batch.teacher.top_ids is not None
    expected = [0, 0, -0.5, -0.6, 0, 0, 0, 0, -0.8, -0.9]
    np.testing.assert_allclose(batch.teacher.logprobs, expected, rtol=1e-6)
    assert batch.teacher.top_ids[[2, 3, 8, 9]].tolist() == [[5, 6], [6, 7], [8, 9], [9, 10]]


async def test_the_teacher_gets_the_images_of_each_sample() -> None:
    group, teacher = make_group(), CountingTeacher()
    group.samples[1].images = (Image(uri="a.png", digest="a", grid=(1, 2, 2), token=9, num_tokens=1),)
    await grading(teacher).grade(group)
    assert sorted(teacher.images) == [(), ("a",)]


async def test_a_teacher_may_be_away_for_a_long_time() -> None:
    group, teacher = make_group(), CountingTeacher(num_failures=2200)
    await grading(teacher, max_retries=1100).grade(group)
    assert len(teacher.starts) == 2202 and not group.failed


async def test_an_empty_response_has_empty_columns() -> None:
    group, teacher = make_group(), CountingTeacher()
    group.samples[0] = Sample(
        index=0, group_index=0, prompt=group.prompt, seed=0, status=SampleStatus.completed, reward=0.0
    )
    await grading(teacher).grade(group)
    assert group.samples[0].teacher is not None and len(group.samples[0].teacher.logprobs) == 0
    batch = build_batch([group], 0)
    assert batch.teacher is not None and len(batch.teacher.logprobs) == len(batch.tokens)


async def test_a_failure_is_retried() -> None:
    group, teacher = make_group(), CountingTeacher(num_failures=2)
    await grading(teacher).grade(group)
    assert len(group.samples) == 2 and not group.failed and len(teacher.starts) == 4


@pytest.mark.parametrize(("status", "num_requests"), [(None, 6), (503, 6), (400, 2)])
async def test_a_lasting_failure_fails_the_trajectory_with_its_cause(status: int | None, num_requests: int) -> None:
    """A server that refuses the request itself is not asked again."""
    group, teacher = make_group(), CountingTeacher(num_failures=99, status=status)
    await grading(teacher).grade(group)
    assert not group.samples and len(teacher.starts) == num_requests
    for sample in group.failed:
        assert sample.status == SampleStatus.failed and sample.reward is None and sample.teacher is None
        assert sample.failure is not None and sample.failure.cause == FailureCause.model_server
        assert sample.failure.message.startswith("the teacher failed: teacher (http://127.0.0.1:9)")


async def test_all_samples_of_a_trajectory_fail_together() -> None:
    group, teacher = make_group(), CountingTeacher(num_failures=1)
    for path, sample in enumerate(group.samples):
        sample.index, sample.path = 5, path
    await grading(teacher, max_retries=0).grade(group)
    assert not group.samples and len(group.failed) == 2


@pytest.mark.parametrize(("source", "scale"), [("math", 0.1), ("code/python", 0.2), ("other", 0.3)])
async def test_the_data_source_chooses_the_teacher(source: str, scale: float) -> None:
    teachers = {"math": CountingTeacher(), "code*": CountingTeacher(scale=0.2)}
    choice = TeacherChoice(default=CountingTeacher(scale=0.3), by_source=teachers)
    group = make_group(source=source)
    await TeacherGrading(choice, max_retries=0).grade(group)
    teacher = group.samples[0].teacher
    assert teacher is not None and teacher.logprobs[0] == pytest.approx(-5 * scale)


async def test_a_row_without_a_teacher_fails_with_its_number_and_source() -> None:
    group = make_group(source="other")
    await TeacherGrading(TeacherChoice(by_source={"math": CountingTeacher()}), max_retries=0).grade(group)
    assert not group.samples and group.failed[0].failure is not None
    expected = "row 3 must have a source in data.teacher_by_source, got 'other'"
    assert group.failed[0].failure.message == expected


async def test_a_batch_never_has_a_zero_for_a_missing_logprob() -> None:
    group = make_group()
    await grading(CountingTeacher()).grade(group)
    group.samples[1].teacher = None
    with pytest.raises(AssertionError, match="sample 1 has no logprobs of the teacher"):
        build_batch([group], 0)
