"""Group `logging`: metrics, samples, trackers and the console."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import FOLDER_NAME, ConfigGroup


class ConsoleMode(StrEnum):
    """Console outputs of a run."""

    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


class WandbMode(StrEnum):
    """Modes of Weights & Biases."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True)
class WandbConfig(ConfigGroup):
    """Weights & Biases."""

    enabled: bool = False
    """Log to Weights & Biases. Needs the extra `rlscale[wandb]`."""

    mode: WandbMode | None = None
    """`online`: stream to the server. `offline`: write files for `wandb sync`. `disabled`: log nothing. None:
    `$WANDB_MODE`, else `online`.
    """

    dir: Annotated[str | None, Field(min_length=1)] = None
    """Parent folder of the `wandb` folder with its files. None: the run folder."""

    key: Annotated[str | None, Field(min_length=1)] = field(default=None, repr=False)
    """API key; never stored. None: `$WANDB_API_KEY`, else the key saved by `wandb login`."""

    host: Annotated[str | None, Field(min_length=1)] = None
    """URL of the server. None: `$WANDB_BASE_URL`, else the public server."""

    # Team, group and project of the run.
    team: Annotated[str | None, Field(min_length=1)] = None
    """Team (entity) of the run. None: the default of the API key."""

    group: Annotated[str | None, Field(min_length=1)] = None
    """Group of the run. None: no group."""

    project: Annotated[str | None, Field(min_length=1)] = None
    """Project of the run. None: `rlscale`."""

    random_suffix: bool = True
    """Append six random characters to the group and to the name of the run."""

    always_use_train_step: bool = False
    """Count the horizontal axes `rollout/step` and `eval/step` in optimiser steps instead of rollouts."""

    run_id: Annotated[str | None, Field(min_length=1)] = None
    """Id of the run to resume, or id of a new run. None: the id stored in the run folder, else a new id."""


@dataclass(kw_only=True)
class TensorboardConfig(ConfigGroup):
    """TensorBoard."""

    enabled: bool = False
    """Log to TensorBoard. Needs the extra `rlscale[tensorboard]`."""

    dir: Annotated[str | None, Field(min_length=1)] = None
    """Folder for the event files of several runs: `<dir>/<project_name>/<experiment_name>`. None: `$TENSORBOARD_DIR`,
    else `tensorboard` in the run folder.
    """

    project_name: Annotated[str | None, Field(min_length=1, pattern=FOLDER_NAME)] = None
    """Folder level between `dir` and the experiment. None: no such level."""

    experiment_name: Annotated[str | None, Field(min_length=1, pattern=FOLDER_NAME)] = None
    """Folder of the event files of this run. None: the name of the run folder; no such level if the event files are in
    the run folder.
    """


@dataclass(kw_only=True)
class LoggingConfig(ConfigGroup):
    """Outputs of metrics and samples."""

    # Console and files.
    interval: Annotated[int, Field(gt=0)] = 1
    """Number of rollouts between two records in Weights & Biases and TensorBoard. Evaluations are always recorded, and
    `metrics.jsonl` contains every rollout.
    """

    console: ConsoleMode = ConsoleMode.auto
    """Console output. `live`: a table that is redrawn. `plain`: a line for each of the first 20 rollouts, then one in
    five seconds at most. `none`: only warnings, and the summary at the end. `auto`: `live` on a terminal with
    Unicode, else `plain`.
    """

    num_samples: Annotated[int, Field(ge=0)] = 8
    """Number of samples per rollout to write to `samples.jsonl`, with tokens and logprobs, for `rlscale-report`. 0:
    none.
    """

    num_timelines: Annotated[int, Field(ge=0)] = 64
    """Number of trajectories per rollout, in whole groups, to write to `timelines.jsonl`: when each waits, generates,
    uses tools and is graded, for `rlscale-report`. 0: none; the metrics `trajectory/*` count all trajectories anyway.
    """

    # Additional metrics.
    log_multi_turn: bool = False
    """Log `multi_turn/*`: turns per sample, and tokens of the policy and of the environment."""

    log_passrate: bool = False
    """Log `passrate/pass@k` for k = 1, 2, 4, ... up to the group size. A sample passes if its reward is 1."""

    log_reward_category: Annotated[str | None, Field(min_length=1)] = None
    """Key of `sample.metadata`, set by the reward: log `reward_category/<value>`, the fraction of samples with each
    value. None: off.
    """

    # Trackers.
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
