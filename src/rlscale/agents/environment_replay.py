"""Replay of an environment from its log: the same observations for the same actions, without the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
    seed, which depend on the config alone.

    Example:
        game = ReplayedEnvironment(custom={"environment_log": "runs/game/environments"}, trajectory=12)
        messages = game.reset().messages
    """

    def __init__(self, custom: Mapping[str, Any], *, trajectory: int | None = None) -> None:
        """Reads the log.

        Args:
            trajectory: the newest episode of this one, whatever the task; None: that of the task.
        """
        path = custom.get("environment_log")
        if not isinstance(path, str):
            fix = "write ++custom.environment_log=<run folder>/environments"
            raise ConfigError([Problem(path=KEY, rule="be the log of a run", value=str(path), fix=fix)])
        self._path, self._trajectory = path, trajectory
        self._episodes = read_episodes(Path(path))
        self._steps: list[dict[str, Any]] = []
        self._number = 0

    def reset(self, task: Task | None = None) -> Observation:
        """The start of the episode of a task.

        Raises:
            ReplayMismatch: the log has no such episode.
        """
        found = [each for each in self._episodes if self._is_wanted(each, task) and each["start"]]
        if not found:
            what = f"trajectory {self._trajectory}" if task is None else f"row {task.index} and seed {task.seed}"
            raise ReplayMismatch(f"{self._path} has no episode of {what}")
        # An episode that was played to its end, before one of a failed attempt.
        episode = max(found, key=lambda each: (each["end"] == "done", len(each["steps"])))
        self._steps, self._number = episode["steps"], 0
        return Observation(messages=episode["start"]["messages"], tools=tuple(episode["start"]["tools"]))

    def step(self, action: Action) -> StepResult:
        """The logged result of an action.

        Raises:
            ReplayMismatch: the log has another action here, or none.
        """
        if self._number == len(self._steps):
            raise ReplayMismatch(f"the episode has {self._number} steps, got another action {action.text[:80]!r}")
        step = self._steps[self._number]
        self._number += 1
        # Ids of calls are those of a renderer, and reasoning is not seen by an environment.
        logged, calls = step["action"], [[call.name, call.arguments] for call in action.tool_calls]
        if (logged["text"], [[each["name"], each["arguments"]] for each in logged["tool_calls"]]) != (
            action.text,
            calls,
        ):
            text, got = f"{logged['text'][:80]!r}", f"{action.text[:80]!r}"
            raise ReplayMismatch(f"action {self._number} must be {text} as in {self._path}, got {got}")
        return StepResult(**step["result"])

    def _is_wanted(self, episode: Mapping[str, Any], task: Task | None) -> bool:
        if self._trajectory is not None:
            return bool(episode["trajectory"] == self._trajectory)
        return task is not None and (episode["row"], episode["seed"]) == (task.index, task.seed)
