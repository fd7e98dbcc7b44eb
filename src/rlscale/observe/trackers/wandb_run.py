"""Weights & Biases tracker. A resumed run continues the same W&B run.

Existing rows are never written again, so a rollout repeated after a resume counts once. Rows lost in a crash come from
the metrics file.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import Error as WandbError

from rlscale.config import WandbConfig, WandbMode
from rlscale.errors import ConfigError, Problem
from rlscale.observe.trackers.check_trackers import wandb_mode
from rlscale.observe.trackers.open_trackers import TrackedRun
from rlscale.observe.trackers.tracker_state import TrackerState
from rlscale.observe.trackers.wandb_files import num_offline_rows
from rlscale.observe.trackers.wandb_rows import WandbRows, is_rollout, row_key
from rlscale.protocols import Metrics

DEFAULT_PROJECT = "rlscale"
ROLLOUT_AXIS, TRAIN_AXIS, EVAL_AXIS = "rollout/step", "train/step", "eval/step"


class WandbSink:
    """Logs into one W&B run. `trackers.json` in the run folder stores its id.

    `train/step` counts optimiser steps. `rollout/step` and `eval/step` count rollouts, or optimiser steps with
    `logging.wandb.always_use_train_step`.

    Raises:
        ConfigError: wandb cannot start the run (login, network, permission).
    """

    may_lack_records = True

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        self._tracked = run
        # With an active run the caller uses the wandb service too, so `close` must leave it running.
        self._owns_service = wandb.run is None
        self._axis_scale = run.steps_per_rollout if config.always_use_train_step else 1
        identity = _identity(config, TrackerState(run.folder))
        folder = Path(os.path.expanduser(config.dir)) if config.dir else run.folder
        folder.mkdir(parents=True, exist_ok=True)
        is_offline = wandb_mode(config) == WandbMode.offline
        num_written = num_offline_rows(folder / "wandb", identity["run_id"])
        self._rows = WandbRows(run.folder, run_id=identity["run_id"])
        self._run = _start(config, run, identity=identity, folder=folder)
        self._rows.keep(num_written if is_offline else int(self._run.starting_step))
        self.location = str(Path(self._run.dir).parent) if is_offline else str(self._run.url)
        self._defined: set[str] = set()

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Adds a row, unless the W&B run already has it."""
        key = row_key(metrics, step=step)
        if key in self._rows or not self._tracked.should_log(metrics, step=step):
            return
        row: dict[str, Any] = dict(metrics)
        if is_rollout(metrics):
            row |= {ROLLOUT_AXIS: step * self._axis_scale, TRAIN_AXIS: step * self._tracked.steps_per_rollout}
        if any(name.startswith("eval/") for name in metrics):
            row[EVAL_AXIS] = step * self._axis_scale
        self._define(row)
        self._run.log(row, step=self._rows.append(key), commit=True)

    def _define(self, row: Mapping[str, Any]) -> None:
        """Sets the x axis of new metrics by name: wandb does not document which of two matching patterns wins."""
        for name in row.keys() - self._defined - {ROLLOUT_AXIS, TRAIN_AXIS, EVAL_AXIS}:
            axis = {"train": TRAIN_AXIS, "eval": EVAL_AXIS}.get(name.partition("/")[0], ROLLOUT_AXIS)
            self._run.define_metric(name, step_metric=axis, step_sync=False)
        self._defined |= row.keys()

    def rewind(self, step: int) -> None:
        """Does nothing: existing rows stay, and `log` skips their repetitions."""

    def close(self) -> None:
        """Ends the W&B run and waits until all rows are written. Marks it as failed during an exception."""
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
        if self._owns_service:
            # The service process still writes after `finish`, and would be killed with the processes of the run.
            wandb.teardown()


def _identity(config: WandbConfig, state: TrackerState) -> dict[str, str]:
    """Id and random suffix of an earlier start, or new ones, written to disk before the W&B run exists."""
    known: dict[str, str] = state.read("wandb")
    if "run_id" in known and config.run_id in (None, known["run_id"]):
        return known
    # The random module's state belongs to the user.
    identity = {"run_id": config.run_id or secrets.token_hex(4), "suffix": secrets.token_hex(3)}
    state.write("wandb", identity)
    return identity


def _start(config: WandbConfig, run: TrackedRun, *, identity: dict[str, str], folder: Path) -> wandb.Run:
    suffix = f"-{identity['suffix']}" if config.random_suffix else ""
    given: dict[str, Any] = {
        "base_url": config.host,
        "api_key": config.key,  # wandb.login would write it to a file
        "entity": config.team,
        "run_group": f"{config.group}{suffix}" if config.group else None,
    }
    settings = wandb.Settings(
        mode=wandb_mode(config).value,
        project=config.project or DEFAULT_PROJECT,
        run_id=identity["run_id"],
        run_name=f"{run.folder.name}{suffix}",
        resume="allow",
        root_dir=str(folder),
        console="off",  # capturing standard output would break the live table
        silent=True,
        **{name: value for name, value in given.items() if value is not None},
    )
    try:
        return wandb.init(settings=settings, config=dict(run.config))
    except WandbError as error:
        fix = "correct the cause, or set logging.wandb.mode=offline"
        text = " ".join(str(error).split())
        raise ConfigError(
            [Problem(path="logging.wandb", rule="be able to start a run", value=text, fix=fix)]
        ) from error
