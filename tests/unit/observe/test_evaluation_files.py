"""Files of evaluations: what is written is read again, and a resumed run repeats evaluations."""

import asyncio
import json
import threading
from collections import UserDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlscale.errors import DataError
from rlscale.observe.evaluation_files import (
    EvaluationFiles,
    Measured,
    find_evaluations,
    group_record,
    read_about,
    read_group,
    read_records,
)
from rlscale.rollout.grading import grade_group
from rlscale.types import REWARDS, Failure, FailureCause, Group, Prompt, Sample, SampleStatus


def made_group(index: int = 0) -> Group:
    prompt = Prompt(index=index, text="1+1=", token_ids=(1, 2), label="2", metadata={"source": "a"})
    samples = []
    for i in range(3):
        sample = Sample(index=3 * index + i, group_index=index, prompt=prompt, seed=i)
        sample.append([5, 6], logprobs=[-0.5, -0.5], weight_versions=[7, 7])
        sample.append([9], logprobs=[0.0], weight_versions=[7], trainable=False)
        sample.response, sample.status, sample.reward = f"answer {i}\u2028", SampleStatus.completed, float(i % 2)
        sample.metadata = {"tool": {"calls": i}, REWARDS: {"acc": 1.0}}
        samples.append(sample)
    failed = samples.pop()
    failed.status, failed.reward = SampleStatus.failed, None
    failed.failure = Failure(cause=FailureCause.grader, message="no")
    return Group(index=index, prompt=prompt, samples=samples, failed=[failed])


def written(folder: Path, version: int, **settings: Any) -> None:
    files = EvaluationFiles(folder, keep_last=settings.get("keep_last"), resume_at=99)
    writer = files.open(Measured.of_run(version, version), {"gsm8k": {"path": "a.jsonl"}, "a/b": {}})
    assert writer is not None
    for index in range(2):
        writer.add("gsm8k", made_group(index))
    writer.add("a/b", made_group())
    writer.commit({"eval/reward_mean": 0.5})


def test_a_group_is_read_as_it_was_but_for_rewards_and_logprobs() -> None:
    group = made_group()
    again = read_group(json.loads(json.dumps(group_record(group))), version=7)
    assert again.prompt == group.prompt and not again.failed, "a grader can be repeated"
    for before, after in zip([*group.samples, *group.failed], again.samples, strict=True):
        assert (after.response, after.seed, after.index) == (before.response, before.seed, before.index)
        assert np.array_equal(after.tokens, before.tokens) and np.array_equal(after.loss_mask, before.loss_mask)
        assert after.reward is None and after.metadata == {"tool": before.metadata["tool"]}
        assert after.status == SampleStatus.completed and after.weight_versions.tolist() == [7, 7, 7]


def test_a_truncated_sample_whose_grader_failed_is_truncated_when_it_is_graded_again() -> None:
    class NoScore:
        async def score(self, samples: Sequence[Sample], **_: Any) -> dict[int, Failure]:
            return {each.index: Failure(cause=FailureCause.grader, message="no") for each in samples}

    group = made_group()
    group.failed, group.samples[0].status = [], SampleStatus.truncated
    for sample in group.samples:
        sample.reward = None
    asyncio.run(grade_group(group, NoScore()))
    assert len(group.failed) == 2 and not group.samples
    record = json.loads(json.dumps(group_record(group)))
    again = read_group(record, version=7)
    assert [sample.status for sample in again.samples] == [SampleStatus.truncated, SampleStatus.completed]
    del record["failed"][0]["failure"]["ended_as"]  # of a file that was written before it was kept
    assert read_group(record, version=7).samples[0].status == SampleStatus.completed


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    group = made_group()
    group.prompt = replace(group.prompt, label="\ud83d é")
    writer = EvaluationFiles(tmp_path, keep_last=None, resume_at=99).open(Measured.of_run(3, 3), {"a": {}})
    assert writer is not None
    writer.add("a", group)
    (record,) = read_records(writer.commit({}) / "0_a.jsonl")
    assert record["label"] == "\ud83d é"


def test_a_sample_keeps_the_versions_of_its_tokens() -> None:
    group = made_group()
    group.samples[0].weight_versions[1:] = 8
    record = json.loads(json.dumps(group_record(group)))
    assert read_group(record, version=0).samples[0].weight_versions.tolist() == [7, 8, 8]
    del record["samples"][0]["weight_versions"]  # of a file that was written before they were kept
    assert read_group(record, version=7).samples[0].weight_versions.tolist() == [7, 7, 7]


def test_an_evaluation_names_its_version_and_settings(tmp_path: Path) -> None:
    written(tmp_path, 12)
    (folder,) = find_evaluations(tmp_path)
    about = read_about(folder)
    assert (folder.name, about["version"], about["num_rollouts"], about["weights"]) == ("v00000012", 12, 12, None)
    assert about["metrics"] == {"eval/reward_mean": 0.5} and about["sets"]["gsm8k"]["path"] == "a.jsonl"
    assert [record["row"] for record in read_records(folder / about["sets"]["gsm8k"]["file"])] == [0, 1]
    assert about["sets"]["a/b"]["file"] == "1_a_b.jsonl"


def test_the_newest_evaluations_are_kept(tmp_path: Path) -> None:
    for version in (0, 5, 10, 9):
        written(tmp_path, version, keep_last=2)
    assert [path.name for path in find_evaluations(tmp_path)] == ["v00000009", "v00000010"]
    none = EvaluationFiles(tmp_path / "other", keep_last=0, resume_at=0)
    assert none.open(Measured.of_run(1, 1), {}) is None and not (tmp_path / "other").exists()


def test_a_resumed_run_deletes_later_and_incomplete_evaluations(tmp_path: Path) -> None:
    for version in (0, 5, 10):
        written(tmp_path, version)
    (tmp_path / "evaluations" / "v00000011.saving").mkdir()
    EvaluationFiles(tmp_path, keep_last=None, resume_at=5)
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["v00000000", "v00000005"]


def test_a_discarded_evaluation_leaves_nothing(tmp_path: Path) -> None:
    writer = EvaluationFiles(tmp_path, keep_last=None, resume_at=0).open(Measured.of_run(1, 1), {"a": {}})
    assert writer is not None
    writer.discard()
    writer.add("a", made_group())
    assert list((tmp_path / "evaluations").iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[1]\n", '{"prompt": 1}\n', "\xff"])
def test_a_broken_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "0_a.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"0_a\.jsonl"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_a_broken_description_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(DataError, match=r"evaluation\.json must describe an evaluation"):
        read_about(tmp_path)


class SlowMetrics(UserDict[str, float]):
    """Lets a thread wait in the middle of `commit`."""

    def __init__(self) -> None:
        super().__init__({"eval/reward_mean": 0.5})
        self.is_read, self.go_on = threading.Event(), threading.Event()

    def keys(self) -> Any:
        self.is_read.set()
        assert self.go_on.wait(30)
        return super().keys()


def test_an_evaluation_that_is_cancelled_while_it_is_completed_is_complete(tmp_path: Path) -> None:
    metrics = SlowMetrics()
    writer = EvaluationFiles(tmp_path, keep_last=None, resume_at=0).open(Measured.of_run(3, 3), {"a": {}})
    assert writer is not None
    with ThreadPoolExecutor() as threads:
        committed = threads.submit(writer.commit, metrics)
        assert metrics.is_read.wait(30)
        discarded = threads.submit(writer.discard)
        wait([discarded], timeout=0.1)  # it must wait for the end of the other
        metrics.go_on.set()
        assert committed.result(30) == tmp_path / "evaluations/v00000003"
        discarded.result(30)
    (found,) = find_evaluations(tmp_path)
    assert sorted(file.name for file in found.iterdir()) == ["0_a.jsonl", "evaluation.json"]


def test_a_run_resumes_although_an_evaluation_was_not_on_disk(tmp_path: Path) -> None:
    written(tmp_path, 2)
    written(tmp_path, 3)
    (tmp_path / "evaluations/v00000003/evaluation.json").write_text("")  # the machine lost its power
    EvaluationFiles(tmp_path, keep_last=None, resume_at=9)
    assert [path.name for path in find_evaluations(tmp_path)] == ["v00000002"]
