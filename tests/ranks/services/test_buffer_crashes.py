"""The rollout buffer is killed while a producer submits and a run reads: nothing is lost, nothing is read twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_scripts import benchmark_script


def kill_and_check(folder: Path, *, num_kills: int) -> None:
    with benchmark_script("buffer_crashes") as script:
        found = script.run(folder, num_kills=num_kills)
    assert found.faults == []
    assert len(found.recovered_s) == num_kills
    assert found.num_submitted == 2 * script.GROUPS_PER_KILL * (num_kills + 1)
    assert found.num_repeated >= num_kills, "each kill was seen"
    assert found.num_resumed > 0


def test_nothing_is_lost_or_read_twice_when_the_service_is_killed(tmp_path: Path) -> None:
    kill_and_check(tmp_path, num_kills=3)


@pytest.mark.nightly
def test_nothing_is_lost_or_read_twice_in_20_kills(tmp_path: Path) -> None:
    kill_and_check(tmp_path, num_kills=20)


def test_lost_and_doubled_trajectories_are_faults() -> None:
    with benchmark_script("buffer_crashes") as script:
        submitter, reader = script.Submitter("http://localhost", 2), script.Reader("http://localhost", 2)
        submitter.accepted = ["0-0", "0-1", "1-0", "1-1"]
        first = {"position": 0, "trajectories": [{"id": "0-0"}, {"id": "0-0"}]}
        reader._add(first, 0)
        reader._add({**first, "trajectories": []}, 0)
        reader._add({"position": 3, "trajectories": [{"id": "2-0"}]}, 1)
        assert script.find_faults(submitter, reader, 2) == [
            "position 0 had two groups",
            "position 1 was answered with the group of 3",
            "1 trajectories were delivered twice",
            "3 accepted trajectories were not delivered, e.g. 0-1",
            "1 trajectories were delivered and not accepted, e.g. 2-0",
        ]
