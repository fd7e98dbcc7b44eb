"""Record of the reason for the end of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.errors import EngineError
from rlscale.observe.run_end import ENDS_FILE, MAX_TEXT, EndReason, recorded_end


def records(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / ENDS_FILE).read_text().splitlines()]
    return [{"reason": each["reason"], "text": each["text"]} for each in found]


def test_each_end_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError), recorded_end(tmp_path):
        raise EngineError("engine 0 died")
    with pytest.raises(KeyboardInterrupt), recorded_end(tmp_path):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), recorded_end(tmp_path) as end:
        end.reason, end.text = EndReason.stopped, "after a checkpoint"
        raise KeyboardInterrupt
    with recorded_end(tmp_path) as end:
        end.reason = EndReason.finished
    assert records(tmp_path) == [
        {"reason": "failed", "text": "EngineError: engine 0 died"},
        {"reason": "interrupted", "text": "SIGINT (Ctrl-C), SIGTERM or SIGHUP (a closed terminal) ended it"},
        {"reason": "stopped", "text": "after a checkpoint"},
        {"reason": "finished", "text": ""},
    ]


def test_a_failure_after_the_last_rollout_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError), recorded_end(tmp_path) as end:
        end.reason = EndReason.finished
        raise ValueError("the checked metric is too low")
    assert records(tmp_path)[0]["reason"] == "failed"


def test_the_end_of_a_long_text_is_kept(tmp_path: Path) -> None:
    with pytest.raises(EngineError), recorded_end(tmp_path):
        raise EngineError("x" * 2 * MAX_TEXT + "the cause")
    (record,) = records(tmp_path)
    assert len(record["text"]) == MAX_TEXT + 4 and record["text"].endswith("the cause")


def test_an_end_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError), recorded_end(tmp_path / "missing"):
        raise EngineError("no space left")


def test_a_line_that_a_full_disk_cut_is_replaced(tmp_path: Path) -> None:
    with recorded_end(tmp_path) as end:
        end.reason = EndReason.finished
    with (tmp_path / ENDS_FILE).open("a") as file:
        file.write('{"start": 2, "ti')
    with recorded_end(tmp_path) as end:
        end.reason = EndReason.stop_reward
    assert [each["reason"] for each in records(tmp_path)] == ["finished", "stop_reward"]
