"""Group `logging`: metrics, samples, trackers and the console."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class ConsoleMode(StrEnum):
    """How a run shows itself."""

    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


class WandbMode(StrEnum):
    """Where Weights & Biases keeps a run."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True)
class WandbConfig(ConfigGroup):
    """Weights & Biases."""

    enabled: Annotated[bool, Field(description="Log to Weights & Biases. Needs the extra `rlscale[wandb]`.")] = False
    mode: Annotated[
        WandbMode | None,
        Field(
            description="`online`: stream to the server. `offline`: write files for `wandb sync`. `disabled`: log "
            "nothing. None: the variable WANDB_MODE, else `online`."
        ),
    ] = None
    dir: Annotated[
        str | None,
        Field(min_length=1, description="Its files go to `<this>/wandb`. None: the run folder."),
    ] = None
    key: Annotated[
        str | None,
        Field(
            min_length=1,
            description="API key; never stored. None: the variable WANDB_API_KEY, else what `wandb login` left.",
        ),
    ] = field(default=None, repr=False)
    host: Annotated[
        str | None,
        Field(min_length=1, description="URL of the server. None: the variable WANDB_BASE_URL, else the public one."),
    ] = None
    team: Annotated[
        str | None,
        Field(min_length=1, description="SenderGroup (entity) of the run. None: the default of the API key."),
    ] = None
    group: Annotated[
        str | None, Field(min_length=1, description="Group of the run, to which others may belong. None: no group.")
    ] = None
    project: Annotated[str | None, Field(min_length=1, description="Project of the run. None: `rlscale`.")] = None
    random_suffix: Annotated[
        bool, Field(description="Append six random characters to the group and to the name of the run.")
    ] = True
    always_use_train_step: Annotated[
        bool,
        Field(
            description="Count `rollout/step` and `eval/step`, the horizontal axes, in optimiser steps instead of "
            "rollouts."
        ),
    ] = False
    run_id: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Go on with the run of this id, or give a new run this id. None: the id that the run folder "
            "keeps, else a new one.",
        ),
    ] = None


@dataclass(kw_only=True)
class TensorboardConfig(ConfigGroup):
    """TensorBoard."""

    enabled: Annotated[bool, Field(description="Log to TensorBoard. Needs the extra `rlscale[tensorboard]`.")] = False
    dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for the event files of several runs: `<dir>/<project_name>/<experiment_name>`. None: "
            "the variable TENSORBOARD_DIR, else `tensorboard` in the run folder.",
        ),
    ] = None
    project_name: Annotated[
        str | None, Field(min_length=1, description="Folder between `dir` and the experiment's. None: no such folder.")
    ] = None
    experiment_name: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder of this run's event files. None: the name of the run folder; in the run folder, none.",
        ),
    ] = None


@dataclass(kw_only=True)
class LoggingConfig(ConfigGroup):
    """Where metrics and samples go."""

    interval: Annotated[
        int,
        Field(
            gt=0,
            description="Rollouts between two records in Weights & Biases and TensorBoard. Evaluations are always "
            "recorded, and `metrics.jsonl` has every rollout.",
        ),
    ] = 1
    console: Annotated[
        ConsoleMode,
        Field(
            description="`live`: a table that is redrawn. `plain`: a line per rollout. `none`: nothing. `auto`: live "
            "on a terminal, else plain."
        ),
    ] = ConsoleMode.auto
    num_samples: Annotated[
        int,
        Field(
            ge=0,
            description="Samples of each rollout that are kept with their tokens and logprobs, in `samples.jsonl`, for "
            "`rlscale-report`. 0: none.",
        ),
    ] = 8
    log_multi_turn: Annotated[
        bool,
        Field(
            description="Add `multi_turn/*`: turns of a sample, and the tokens of the policy and of its environment."
        ),
    ] = False
    log_passrate: Annotated[
        bool,
        Field(
            description="Add `passrate/pass@k` for k = 1, 2, 4, ... up to the samples of a group; a sample passes when "
            "its reward is 1."
        ),
    ] = False
    log_reward_category: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Add `reward_category/<value>`, the share of samples with each value that the reward left in "
            "`sample.metadata` under this name. None: off.",
        ),
    ] = None
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
