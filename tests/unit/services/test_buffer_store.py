"""The file of the rollout buffer: what is accepted, and what each reader gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.services.buffer_store import BufferFileError, BufferStore, GroupCounts, ReaderError
from rlscale.services.trajectory_record import SubmissionError, parse_submission
from tests.buffer_process import trajectory


def submit(store: BufferStore, *records: dict[str, Any]) -> int:
    return store.submit(parse_submission(json.dumps(list(records)).encode()))


def submit_groups(store: BufferStore, *names: str) -> None:
    for name in names:
        submit(store, *[trajectory(f"{name}-{i}", name) for i in range(2)])


def read(store: BufferStore, reader: str, position: int, number: int = 10) -> list[str]:
    groups = store.next_groups(reader, task="math", size=2, position=position, number=number)
    assert [group.position for group in groups] == list(range(position, position + len(groups)))
    return [group.name for group in groups]


def test_a_position_of_a_log_has_one_group_for_ever(tmp_path: Path) -> None:
    store = BufferStore(tmp_path / "file")
    submit_groups(store, "a", "b", "c")
    assert read(store, "run 1", 0, number=2) == ["a", "b"]
    assert read(store, "run 2", 0) == ["c"], "a group is delivered to one reader"
    submit_groups(store, "d")
    store.close()
    store = BufferStore(tmp_path / "file")
    assert read(store, "run 1", 0) == ["a", "b", "d"]
    assert read(store, "run 1", 1) == ["b", "d"]
    (group,) = store.groups_at("run 1", [1])
    assert [json.loads(body)["id"] for body in group.bodies] == ["b-0", "b-1"]
    with pytest.raises(ReaderError, match=r"position must be at most 3, .* got 4; start the service with the file"):
        read(store, "run 1", 4)


def test_groups_are_delivered_in_the_order_of_their_completion(tmp_path: Path) -> None:
    store = BufferStore(tmp_path / "file")
    submit(store, trajectory("a-0", "a"))
    submit_groups(store, "b")
    submit(store, trajectory("x-0", "x", task_type="code", group_size=1), trajectory("y-0", "y", group_size=1))
    assert store.count("math", size=2) == GroupCounts(incomplete=1, ready=1, other_size=1, delivered=0)
    assert read(store, "run", 0) == ["b"]
    submit(store, trajectory("a-1", "a"))
    assert read(store, "run", 1) == ["a"]


def test_a_repeated_submission_is_stored_once_and_a_wrong_one_not_at_all(tmp_path: Path) -> None:
    store = BufferStore(tmp_path / "file")
    assert submit(store, trajectory("a-0", "a")) == 1
    assert submit(store, trajectory("a-0", "a"), trajectory("a-1", "a")) == 1
    for wrong, message in (
        (trajectory("a-0", "a", reward=0.5), r"\[1\]\.id must be new, got 'a-0' with other contents"),
        (trajectory("a-2", "a"), r"\[1\]\.group must have fewer than its group_size=2 trajectories"),
    ):
        with pytest.raises(SubmissionError, match=message):
            submit(store, trajectory("b-0", "b"), wrong)
    with pytest.raises(
        SubmissionError, match=r"group_size must be 2, as for the other trajectories of group 'b', got 3"
    ):
        submit(store, trajectory("b-0", "b"), trajectory("b-1", "b", group_size=3))
    assert submit(store, trajectory("b-0", "b")) == 1, "a refused list stores nothing"


def test_old_groups_are_pruned_and_their_ids_stay_known(tmp_path: Path) -> None:
    store = BufferStore(tmp_path / "file", keep_groups=2)
    submit_groups(store, "a", "b", "c")
    assert read(store, "run", 0, number=1) == ["a"]
    assert read(store, "run", 1) == ["b", "c"]
    assert read(store, "run", 1) == ["b", "c"]
    with pytest.raises(ReaderError, match=r"position must be of a group that is kept, got 0; .* --keep-groups"):
        read(store, "run", 0)
    assert submit(store, trajectory("a-0", "a")) == 0


def test_a_file_belongs_to_one_service_and_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    store = BufferStore(path)
    submit_groups(store, "a")
    assert {each.stat().st_mode & 0o77 for each in tmp_path.iterdir()} == {0}
    with pytest.raises(BufferFileError, match=r"got .*file; another service has it open"):
        BufferStore(path)
    store.close()
    BufferStore(path).close()


@pytest.mark.parametrize(
    ("name", "cause"), [("text", "it is no SQLite file"), ("missing/file", "No such file"), (".", "Is a directory")]
)
def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path, name: str, cause: str) -> None:
    (tmp_path / "text").write_text("notes of someone else")
    with pytest.raises(BufferFileError, match=cause):
        BufferStore(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["text"]
