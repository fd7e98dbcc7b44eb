"""Logs of environments, and replays from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.agents import environment_replay
from rlscale.agents.environment import Action, StepResult, Task
from rlscale.agents.environment_log import EnvironmentLog, Episode, read_episodes
from rlscale.agents.environment_replay import ReplayedEnvironment, ReplayMismatch
from rlscale.errors import ConfigError, DataError
from rlscale.renderers.renderer import ToolCall

START = {"messages": [{"role": "user", "content": "go"}], "tools": []}
TASK = Task(index=7, messages=(), seed=7)
RESULT: dict[str, Any] = {"messages": [], "reward": 1.0, "done": True, "metadata": {}}


def episode(number: int, *, steps: int = 1) -> Episode:
    made = Episode(trajectory=number, task=Task(index=number, messages=(), seed=number), start=START, end="done")
    for i in range(steps):
        made.add_step(Action(text=str(i), tool_calls=(ToolCall(name="up", arguments="{}"),)), RESULT, 0.5)
    return made


def test_a_log_keeps_the_newest_episodes(tmp_path: Path) -> None:
    log = EnvironmentLog(tmp_path, keep=2)
    for number in range(5):
        log.write(episode(number))
    assert [each["trajectory"] for each in read_episodes(tmp_path)] == [2, 3, 4]
    # A resumed run begins a new file.
    EnvironmentLog(tmp_path, keep=2).write(episode(5))
    assert [each["trajectory"] for each in read_episodes(tmp_path)] == [4, 5]


def test_a_replay_answers_as_the_log_does(tmp_path: Path) -> None:
    EnvironmentLog(tmp_path, keep=9).write(episode(7, steps=2))
    replay = ReplayedEnvironment({"environment_log": str(tmp_path)}, trajectory=7)
    assert replay.reset().messages == START["messages"]
    call = ToolCall(name="up", arguments="{}", id="another")
    assert replay.step(Action(text="0", tool_calls=(call,))) == StepResult(**RESULT)
    with pytest.raises(ReplayMismatch, match=r"action 2 must be '1' as in .*, got '1'"):
        replay.step(Action(text="1"))
    with pytest.raises(ReplayMismatch, match="the episode has 2 steps, got another action 'x'"):
        replay.step(Action(text="x"))
    with pytest.raises(ReplayMismatch, match="has no episode of row 7 and seed 8"):
        ReplayedEnvironment({"environment_log": str(tmp_path)}).reset(Task(index=7, messages=(), seed=8))


def test_the_actions_choose_among_episodes_of_one_number(tmp_path: Path) -> None:
    """Training and evaluations count their trajectories apart, and an evaluation is repeated with the same seeds."""
    log = EnvironmentLog(tmp_path, keep=9)
    for text, is_evaluation in (("a", True), ("b", True), ("c", False), ("d", True)):
        made = Episode(
            trajectory=7, task=TASK, is_evaluation=is_evaluation, start={**START, "messages": text}, end="done"
        )
        made.add_step(Action(text=text), {**RESULT, "reward": ord(text)}, 0.5)
        log.write(made)
    replay = ReplayedEnvironment({"environment_log": str(tmp_path)}, trajectory=7)
    assert replay.reset().messages == "c"
    for chosen in (replay, ReplayedEnvironment({"environment_log": str(tmp_path)})):
        for text in "abcd":
            chosen.reset(TASK)
            assert chosen.step(Action(text=text)).reward == ord(text)
    replay.reset()
    with pytest.raises(ReplayMismatch, match="action 1 must be 'c' or 'd' or 'b' as in"):
        replay.step(Action(text="x"))


def test_all_environments_of_a_process_read_a_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(environment_replay, "read_episodes", lambda path: (reads.append(path), read_episodes(path))[1])
    log = EnvironmentLog(tmp_path, keep=9)
    log.write(episode(7))
    for _ in range(3):
        ReplayedEnvironment({"environment_log": str(tmp_path)}, trajectory=7).reset()
    assert reads == [tmp_path]
    log.write(episode(8))  # of a run that continues
    ReplayedEnvironment({"environment_log": str(tmp_path)}, trajectory=8).reset()
    assert reads == [tmp_path] * 2


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    made = episode(7)
    half = "\ud83d"  # the policy may write its escape in the arguments of a call
    made.add_step(Action(text="", tool_calls=(ToolCall(name="up", arguments=f'{{"a": "é{half}"}}'),)), RESULT, 0.5)
    EnvironmentLog(tmp_path, keep=9).write(made)
    (read,) = read_episodes(tmp_path)
    assert r"\u00e9\ud83d" in json.dumps(read)


def test_a_wrong_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom\.environment_log must be the log of a run, got None"):
        ReplayedEnvironment({})
    with pytest.raises(DataError, match="must be a log of environments, got no episode"):
        read_episodes(tmp_path)
    (tmp_path / "0.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"0\.jsonl, line 1 must be an episode"):
        read_episodes(tmp_path)
