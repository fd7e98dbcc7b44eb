"""Data of the sections about ends, outcomes and timelines: what they count, and that they stay small."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.errors import EngineError
from rlscale.observe.jsonl import JsonlSink
from rlscale.observe.provenance import write_provenance
from rlscale.observe.report.page import SECTIONS, render
from rlscale.observe.report.run_reader import RunData, read_run
from rlscale.observe.report.sections.end_section import describe_ends
from rlscale.observe.report.sections.lane_section import MAX_ROLLOUTS, MAX_TIMELINE_BYTES, read_timelines
from rlscale.observe.report.sections.outcome_section import MAX_LEDGER_BYTES, count_outcomes
from rlscale.observe.rollout_log import LEDGER_FILE, TIMELINES_FILE
from rlscale.observe.run_end import ENDS_FILE, recorded_end
from tests.unit.observe.report.made_run import clean_checkout, make_run


def load(folder: Path) -> RunData:
    return read_run(folder, max_samples=10)


def start_again(folder: Path) -> None:
    config_yaml = (folder / "config.yaml").read_text()
    write_provenance(folder, config_yaml=config_yaml, overrides=[], read_git=clean_checkout)


def test_every_section_is_listed_once() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)


def test_each_start_has_its_end(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=3, finished=False)
    with pytest.raises(EngineError), recorded_end(tmp_path):
        raise EngineError("engine 0 died")
    start_again(tmp_path)
    with pytest.raises(KeyboardInterrupt), recorded_end(tmp_path):
        raise KeyboardInterrupt
    start_again(tmp_path)
    found = describe_ends(load(tmp_path))
    assert found["number"] == 3
    assert [(each["state"], each["title"]) for each in found["starts"]] == [
        ("failed", "failed"),
        ("stopped", "interrupted"),
        ("failed", "ended without a record"),
    ]
    assert found["starts"][0]["text"] == "EngineError: engine 0 died"
    assert [each["rollouts"] for each in found["starts"]] == [[0, 2], None, None]
    assert found["starts"][0]["seconds"] >= 0 and found["starts"][2]["seconds"] is None


@pytest.mark.parametrize("name", ["train/critic_loss", "throughput/samples_per_s"])
def test_a_rollout_that_trains_no_policy_counts(name: str, tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=1, finished=False)
    metrics = JsonlSink(tmp_path / "metrics.jsonl", resume_at_step=0)
    metrics.log({"eval/reward_mean": 0.5}, step=0)
    metrics.log({name: 1.0}, step=3)
    metrics.log({"eval/reward_mean": 0.5}, step=4)
    metrics.close()
    (start,) = describe_ends(load(tmp_path))["starts"]
    assert start["rollouts"] == [3, 3]
    assert "4 of 1" in render(load(tmp_path))


def test_a_run_that_holds_its_lock_is_running(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=1, finished=False)
    with (tmp_path / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (start,) = describe_ends(load(tmp_path))["starts"]
    assert (start["state"], start["title"]) == ("running", "still running")


def test_a_finished_run_without_a_record_is_finished(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=1)
    (tmp_path / ENDS_FILE).unlink()
    (start,) = describe_ends(load(tmp_path))["starts"]
    assert (start["state"], start["title"]) == ("finished", "all rollouts are done")


def test_outcomes_are_counted_by_rollout_and_in_total(tmp_path: Path) -> None:
    found = count_outcomes(load(make_run(tmp_path, num_rollouts=3)))
    # Every page has one open trajectory; only that of the last one is still open.
    assert found["total"] == {"trained": 48, "dropped/equal_rewards": 36, "failed/grader": 9, "open": 1}
    assert found["outcomes"] == ["trained", "dropped/equal_rewards", "failed/grader", "open"]
    assert found["columns"]["failed/grader"] == [3, 3, 3]
    assert (found["group_size"], found["num_pages"], len(found["pages"])) == (4, 3, 3)


def test_a_run_without_a_ledger_has_no_outcomes(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=1)
    (tmp_path / LEDGER_FILE).unlink()
    found = count_outcomes(load(tmp_path))
    assert (found["total"], found["pages"], found["outcomes"]) == ({}, [], [])


@pytest.mark.slow
def test_the_ledger_of_a_long_run_is_cut_and_its_counts_are_not(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=1)
    num_rollouts, ids = 4000, [str(2 * i) for i in range(300)]
    lines = [json.dumps({"step": step, "trained": ids, "open": []}) + "\n" for step in range(num_rollouts)]
    (tmp_path / LEDGER_FILE).write_text("".join(lines))
    found = count_outcomes(load(tmp_path))
    assert found["total"] == {"trained": 300 * num_rollouts}
    assert found["num_pages"] == num_rollouts and found["pages"][-1]["step"] == num_rollouts - 1
    assert len(json.dumps(found["pages"])) <= 1.1 * MAX_LEDGER_BYTES
    assert sum(found["columns"]["trained"]) == 300 * num_rollouts and len(found["steps"]) <= 1500


@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["many rollouts", "many bytes"])
@pytest.mark.slow
def test_the_timelines_of_a_long_run_are_cut(tmp_path: Path, text: str) -> None:
    make_run(tmp_path, num_rollouts=1)
    num_rollouts = 500
    record: dict[str, Any] = {"start": 0.0, "num_groups": 1, "groups": [], "text": text}
    with (tmp_path / TIMELINES_FILE).open("w") as file:
        file.writelines(json.dumps({"step": step, **record}) + "\n" for step in range(num_rollouts))
    found = read_timelines(load(tmp_path))
    assert found["number"] == num_rollouts and found["rollouts"][-1]["step"] == num_rollouts - 1
    assert len(found["rollouts"]) <= MAX_ROLLOUTS
    assert len(json.dumps(found["rollouts"])) <= 1.1 * MAX_TIMELINE_BYTES
