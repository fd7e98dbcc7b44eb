import os
from pathlib import Path

import numpy as np

from rlscale.agents.run_log import AgentLogs
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Prompt


def make_trajectory(number: int) -> Trajectory:
    return Trajectory(id=number, group_index=0, prompt=Prompt(index=6, text="", token_ids=(1,)), seed=0)


def test_a_log_has_output_end_and_turns_of_each_attempt(tmp_path: Path) -> None:
    logs = AgentLogs(tmp_path, keep=10, max_bytes=1000)
    trajectory = make_trajectory(97)
    trajectory.extend([4, 5], logprobs=np.zeros(2), weight_versions=np.zeros(2, int), sampled=True, text="call")
    for failure in (Failure(cause=FailureCause.environment, message="too late"), None):
        log = logs.open(trajectory, rid="train-24-97", version=12)
        log.write(b"step 1\nstep 2\n")
        assert log.last_line == "step 2"
        log.close(trajectory, failure)
    text = (tmp_path / "12" / "97.log").read_text()
    assert text.count("trajectory 97, prompt row 7\nstep 1\nstep 2\n") == 2
    assert text.index("failed (environment): too late") < text.index(" ended")
    assert text.count("turn 0 (sampled, 2 tokens, after the prompt): 'call'") == 2


def test_a_log_has_the_messages_of_given_turns(tmp_path: Path) -> None:
    trajectory = make_trajectory(0)
    trajectory.extend([4, 5])
    trajectory.turns[0].messages = ({"role": "tool", "content": "42"}, {"role": "user", "content": "again"})
    AgentLogs(tmp_path, keep=1, max_bytes=1000).open(trajectory, rid="train-0-0", version=0).close(trajectory, None)
    text = (tmp_path / "0" / "0.log").read_text()
    assert "turn 0 (given, 2 tokens, after the prompt): 'tool: 42\\nuser: again'" in text


def test_the_last_line_does_not_depend_on_the_pieces_of_the_output(tmp_path: Path) -> None:
    for pieces in ([b"a\nb c\n"], [b"a\n", b"b c\n"], [b"a", b"\nb ", b"c\n", b"\n"], [b"a\nb", b" ", b"c"]):
        log = AgentLogs(tmp_path, keep=1, max_bytes=1000).open(make_trajectory(0), rid="train-0-0", version=0)
        for piece in pieces:
            log.write(piece)
        assert log.last_line == "b c"
        log.close(None, None)


def test_output_beyond_the_limit_is_dropped_in_the_middle(tmp_path: Path) -> None:
    log = AgentLogs(tmp_path, keep=1, max_bytes=20).open(make_trajectory(0), rid="train-0-0", version=0)
    for number in range(1000):
        log.write(b"%04d\n" % number)
    log.close(None, None)
    body = (tmp_path / "0" / "0.log").read_text().partition("row 7\n")[2]
    assert body.startswith("0000\n0001\n\n[4980 bytes dropped]\n0998\n0999\n")


def test_the_newest_logs_are_kept_also_after_a_restart(tmp_path: Path) -> None:
    logs = AgentLogs(tmp_path, keep=2, max_bytes=100)
    for number, version in enumerate([0, 0, 1]):
        logs.open(make_trajectory(number), rid=f"train-{number}-{number}", version=version).close(None, None)
        os.utime(tmp_path / str(version) / f"{number}.log", (number, number))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")) == ["0/1.log", "1/2.log"]
    again = AgentLogs(tmp_path, keep=2, max_bytes=100)
    again.open(make_trajectory(7), rid="eval-gsm8k-3-7", version=1).close(None, None)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")) == [
        "1/2.log",
        "eval-gsm8k-1/7.log",
    ]
    assert not (tmp_path / "0").exists()


def test_a_log_that_replaces_the_only_one_of_its_folder_is_written(tmp_path: Path) -> None:
    logs = AgentLogs(tmp_path, keep=1, max_bytes=100)
    for number in range(2):
        logs.open(make_trajectory(number), rid="train-0-0", version=0).close(None, None)
    assert [path.name for path in tmp_path.rglob("*.log")] == ["1.log"]
