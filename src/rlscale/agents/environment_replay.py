"""Replay of an environment from its log: the same observations for the same actions, without the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from rlscale.agents.environment import Action, Observation, StepResult, Task
from rlscale.agents.environment_log import read_episodes
from rlscale.errors import ConfigError, Problem

KEY = "custom.environment_log"


class ReplayMismatch(Exception):
    """An action differs from that of the log."""


class ReplayedEnvironment:
    """Answers from a log; `agent.environment_path=rlscale.agents.environment_replay:ReplayedEnvironment`.

    `custom.environment_log` is a file, or the folder `environments` of a run. An episode is found by its row and its
    seed, which depend on the config alone. Of several ones, e.g. those of an evaluation that was repeated after each
    rollout, the actions choose.

    Example:
        game = ReplayedEnvironment(custom={"environment_log": "runs/game/environments"}, trajectory=12)
        messages = game.reset().messages
    """

    def __init__(self, custom: Mapping[str, Any], *, trajectory: int | None = None) -> None:
        """Reads the log.

        Args:
            trajectory: its episode, whatever the task; evaluations count theirs from 0, too, and come after those of
                training. None: the episode of the task.
        """
        path = custom.get("environment_log")
        if not isinstance(path, str):
            fix = "write ++custom.environment_log=<run folder>/environments"
            raise ConfigError([Problem(path=KEY, rule="be the log of a run", value=str(path), fix=fix)])
        self._path, self._trajectory = path, trajectory
        self._log = _log_of(path)
        self._fitting: list[Mapping[str, Any]] = []  # episodes with the actions so far, the preferred one first
        self._number = 0

    def reset(self, task: Task | None = None) -> Observation:
        """The start of the episode of a task.

        Raises:
            ReplayMismatch: the log has no such episode.
        """
        log = self._log
        if self._trajectory is not None:
            found = log.by_trajectory.get(self._trajectory, [])
        else:
            found = [] if task is None else log.by_task.get((task.index, task.seed), [])
        if not found:
            what = f"trajectory {self._trajectory}" if task is None else f"row {task.index} and seed {task.seed}"
            advice = f"it has the newest {log.num_episodes} of its run, where agent.keep_logs sets how many are kept"
            raise ReplayMismatch(f"{self._path} has no episode of {what}; {advice}")
        # An episode that was played to its end, before one of a failed attempt; then the newest.
        ranks = [
            (not each["is_evaluation"], each["end"] == "done", len(each["steps"]), place)
            for place, each in enumerate(found)
        ]
        self._fitting = [found[place] for *_, place in sorted(ranks, reverse=True)]
        self._number, start = 0, self._fitting[0]["start"]
        return Observation(messages=start["messages"], tools=tuple(start["tools"]))

    def step(self, action: Action) -> StepResult:
        """The logged result of an action.

        Raises:
            ReplayMismatch: the log has another action here, or none.
        """
        playing = [each["steps"] for each in self._fitting if len(each["steps"]) > self._number]
        if not playing:
            raise ReplayMismatch(f"the episode has {self._number} steps, got another action {action.text[:80]!r}")
        number, self._number = self._number, self._number + 1
        fitting = [each for each in self._fitting if each["steps"][number:] and _is_same(each["steps"][number], action)]
        if not fitting:
            texts = dict.fromkeys(repr(steps[number]["action"]["text"][:80]) for steps in playing)
            wanted, got = " or ".join(list(texts)[:3]), f"{action.text[:80]!r}"
            raise ReplayMismatch(f"action {number + 1} must be {wanted} as in {self._path}, got {got}")
        self._fitting = fitting
        return StepResult(**fitting[0]["steps"][number]["result"])


def _is_same(step: Mapping[str, Any], action: Action) -> bool:
    # Ids of calls are those of a renderer, and reasoning is not seen by an environment.
    logged = step["action"]
    calls = [[each["name"], each["arguments"]] for each in logged["tool_calls"]]
    return bool(logged["text"] == action.text and calls == [[each.name, each.arguments] for each in action.tool_calls])


@dataclass(frozen=True, slots=True)
class _Log:
    """The episodes of a log that have a start, in its order."""

    num_episodes: int
    by_trajectory: Mapping[int, list[Mapping[str, Any]]]
    by_task: Mapping[tuple[int, int], list[Mapping[str, Any]]]  # by row and seed


def _log_of(path: str) -> _Log:
    """The log, which is read once for all environments of a process, and again when it has changed."""
    root = Path(path)
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    state = tuple((each.name, each.stat().st_mtime_ns) for each in files if each.exists())
    with _READING:
        return _read(path, state)


# Environments start at the same time, in threads: without the lock each would read the log.
_READING = Lock()


@lru_cache(maxsize=1)
def _read(path: str, _state: tuple[tuple[str, int], ...]) -> _Log:
    episodes = read_episodes(Path(path))
    by_trajectory: dict[int, list[Mapping[str, Any]]] = {}
    by_task: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for each in episodes:
        if each["start"]:
            by_trajectory.setdefault(each["trajectory"], []).append(each)
            by_task.setdefault((each["row"], each["seed"]), []).append(each)
    return _Log(len(episodes), by_trajectory, by_task)
