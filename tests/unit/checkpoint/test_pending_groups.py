"""Finished groups are the same after they are saved and loaded."""

from pathlib import Path

import numpy as np
import pytest

from rlscale.checkpoint.pending_groups import (
    COLUMNS_FILE,
    GROUPS_FILE,
    load_dropped,
    load_groups,
    save_dropped,
    save_groups,
)
from rlscale.errors import DataError
from rlscale.teacher_scores import TeacherScores
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus


def make_groups() -> list[Group]:
    made = []
    for index in (6, 9):
        prompt = Prompt(
            index=index,
            text="a+b=",
            token_ids=(1, 2, 3),
            label="c",
            metadata={"level": [1, "x"]},
            messages=({"role": "user", "content": "a+b"},),
        )
        samples = [
            Sample(
                index=2 * index + j,
                group_index=index,
                prompt=prompt,
                seed=77 + j,
                response="é",
                status=SampleStatus.truncated if j else SampleStatus.completed,
                reward=0.1 + j,
                metadata={"note": None},
            )
            for j in range(2)
        ]
        # Trainable tokens of two versions, a masked token, and a sample without response.
        samples[0].append([4, 5], logprobs=[-0.1234567890123, -2.0], weight_versions=[7, 8])
        samples[0].append([6], logprobs=[0.0], weight_versions=[8], trainable=False)
        samples[1].append([], logprobs=[], weight_versions=[])
        made.append(Group(index=index, prompt=prompt, samples=samples))
    return made


def test_loaded_groups_equal_the_saved_ones(tmp_path: Path) -> None:
    save_groups(tmp_path, make_groups())
    assert load_groups(tmp_path) == make_groups()
    assert all(sample.prompt is group.prompt for group in load_groups(tmp_path) for sample in group.samples)


def test_logprobs_of_teachers_are_kept(tmp_path: Path) -> None:
    made = make_groups()
    # One sample without: it has failed before a teacher was asked.
    for number, sample in enumerate(sample for group in made for sample in group.samples[:1]):
        values = np.arange(3, dtype=np.float32) - number
        top = np.stack([values, values - 1], axis=1)
        ids = np.arange(6, dtype=np.int32).reshape(3, 2)
        sample.teacher = TeacherScores(logprobs=values, top_ids=ids, top_logprobs=top)
    save_groups(tmp_path, made)
    loaded = load_groups(tmp_path)
    assert loaded == made
    assert loaded[1].samples[0].teacher == made[1].samples[0].teacher != made[0].samples[0].teacher
    assert loaded[0].samples[1].teacher is None


def test_failed_samples_and_the_causes_of_failures_are_kept(tmp_path: Path) -> None:
    made = make_groups()
    failed = made[0].samples.pop()
    failed.status, failed.reward = SampleStatus.failed, None
    failed.failure = Failure(cause=FailureCause.grader, message="no answer")
    made[0].failed.append(failed)
    made[1].samples[0].failure = Failure(cause=FailureCause.budget, message="no tokens left")
    save_groups(tmp_path, made)
    assert load_groups(tmp_path) == made


def test_dropped_groups_are_kept_by_rollout(tmp_path: Path) -> None:
    first, second = make_groups()
    save_groups(tmp_path, [first])
    save_dropped(tmp_path, {3: [second], 12: [first, second], 13: []})
    assert load_dropped(tmp_path) == {3: [second], 12: [first, second]}
    assert load_groups(tmp_path) == [first]


def test_loaded_routes_keep_their_dtype(tmp_path: Path) -> None:
    made = make_groups()
    routes = np.arange(6 * 2 * 3, dtype=np.uint16).reshape(6, 2, 3)
    made[1].samples[0].routes = routes
    save_groups(tmp_path, made)
    first, second = load_groups(tmp_path)
    assert [sample.routes for sample in (*first.samples, second.samples[1])] == [None] * 3
    read = second.samples[0].routes
    assert read is not None and read.dtype == np.uint16 and (read == routes).all()


def test_no_file_is_written_without_groups(tmp_path: Path) -> None:
    save_groups(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    assert load_groups(tmp_path) == []


@pytest.mark.parametrize("broken", [GROUPS_FILE, COLUMNS_FILE])
def test_the_error_for_a_broken_file_names_it(tmp_path: Path, broken: str) -> None:
    save_groups(tmp_path, make_groups())
    (tmp_path / broken).write_bytes(b"[{")
    with pytest.raises(
        DataError, match=r"groups\.json and groups\.safetensors must contain the checkpoint's finished groups"
    ):
        load_groups(tmp_path)


def test_columns_of_fewer_samples_are_refused(tmp_path: Path) -> None:
    save_groups(tmp_path, make_groups())
    entries = (tmp_path / GROUPS_FILE).read_text()
    save_groups(tmp_path, make_groups()[:1])
    # The JSON has four samples now, the columns two.
    (tmp_path / GROUPS_FILE).write_text(entries)
    with pytest.raises(DataError):
        load_groups(tmp_path)


def test_numpy_metadata_are_converted_to_python_numbers(tmp_path: Path) -> None:
    made = make_groups()
    made[0].samples[0].metadata = {"score": np.float32(0.5), "parts": np.array([1, 2])}
    save_groups(tmp_path, made)
    assert load_groups(tmp_path)[0].samples[0].metadata == {"score": 0.5, "parts": [1, 2]}


def test_metadata_that_are_no_json_values_are_an_error(tmp_path: Path) -> None:
    made = make_groups()
    made[0].samples[0].metadata = {"set": {1}}
    with pytest.raises(TypeError, match="metadata of a sample must be JSON values to be kept in a checkpoint, got set"):
        save_groups(tmp_path, made)
