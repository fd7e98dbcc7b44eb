"""Group `sampling`: over-sampling, filters and partial rollouts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup

TAIL_SHARE = 0.2
"""Share of the prompts, those with the longest expected responses, that tail batching collects."""


class ScheduleName(StrEnum):
    """Orders of the prompts of a rollout."""

    plain = "plain"
    longest_first = "longest_first"
    tail_batching = "tail_batching"


class GenerateIsolation(StrEnum):
    """Places of a generate function."""

    process = "process"
    thread = "thread"


@dataclass(kw_only=True)
class SamplingConfig(ConfigGroup):
    """Over-sampling, filters, partial rollouts and user code for generation."""

    # Number of groups in flight.
    over_sampling_batch_size: Annotated[int | None, Field(gt=0)] = None
    """Number of prompts to submit at the beginning of a rollout, and whenever fewer groups are in flight than the
    rollout still needs; at least `batch.rollout_batch_size`, and if more, at most 1,000,000 trajectories. Groups beyond
    the size of the rollout stay in the buffer for the next one. None: `batch.rollout_batch_size`.
    """

    schedule: ScheduleName = ScheduleName.plain
    """Order of the prompts. `plain`: that of the data. `longest_first`: prompts with the longest expected responses are
    submitted first. `tail_batching`: also collects the longest fifth of the prompts, until they fill a whole rollout.
    The expected length of a prompt is that of its last group, else the mean over all prompts.
    """

    difficulty_weights: Annotated[list[float] | None, Field(min_length=1)] = None
    """Relative sampling weights of prompts by difficulty: of equal intervals of the mean reward so far, from 0 to 1.
    With [0.2, 1, 1, 0.1] prompts with a mean reward of 0.75 or more are drawn a tenth as often as those from 0.25 on.
    The mean is over the groups that were trained on and those that a filter dropped; failures do not count. Prompts
    without a reward are always drawn. None: all prompts are drawn equally often.
    """

    dynamic_filter_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Filter of finished groups (dynamic sampling of DAPO, arXiv:2503.14476); another prompt replaces a dropped group.
    Built in: `rlscale.rollout.group_filters:reward_std` drops groups whose rewards are all equal, and
    `rlscale.rollout.group_filters:accuracy_band` those whose mean reward is outside `custom.accuracy_band`. Or your own
    function, `package.module:name`, called with a group: it returns true to keep it, or the reason to drop it. None:
    all groups are kept, except with `algo.dynamic_sampling`, which selects `reward_std`.
    """

    partial_rollout: bool = False
    """Complete a rollout with the groups that finish first, and continue the others in the next rollout with its
    weights. false: a rollout has the first groups in the order of their prompts, and waits for each of them.
    """

    mask_offpolicy_in_partial_rollout: bool = False
    """Mask the tokens of a trajectory or a continued group that earlier weights generated than its newest ones. Needs
    `sampling.partial_rollout`.
    """

    round_tokens: Annotated[int | None, Field(gt=0)] = None
    """Generate a partial rollout in rounds of this many tokens: all groups in flight end a round together, and those
    that finish in it come in the order of their prompts. A run then repeats exactly, whatever the speed of engines, at
    the price of one more prefill of each response per round. None: groups finish when their engine does. Only with
    `sampling.partial_rollout`.
    """

    max_weight_versions: Annotated[int, Field(ge=1)] = 5
    """Maximum number of weight versions that generate one trajectory; one that has as many starts again. Only with
    `sampling.partial_rollout`.
    """

    # Failures.
    min_group_size: Annotated[int, Field(ge=1)] = 2
    """Minimum number of trajectories of a group that must not fail; a smaller group is dropped, and another prompt
    replaces it. A group of `batch.n_samples_per_prompt=1` needs one.
    """

    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of failed trajectories of the last 3 rollouts above which the run stops. Failures of engines, graders,
    tools and user code are retried, and are never trained on.
    """

    max_retries: Annotated[int, Field(ge=0)] = 2
    """Number of times that a failed trajectory starts again before it counts as failed."""

    # User code.
    custom_generate_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that generates one trajectory, e.g. with tool calls. None: one request
    to an engine.
    """

    generate_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Maximum time of one call of `sampling.custom_generate_function_path`, in seconds; a longer one has failed."""

    generate_isolation: GenerateIsolation = GenerateIsolation.process
    """Place of `sampling.custom_generate_function_path`. `process`: in processes that trajectories share, so that a
    crash or an endless loop costs trajectories and not the run. `thread`: in the process of the run, outside of its
    event loop, for a function that shares objects with other functions of the run.
    """

    generate_processes: Annotated[int, Field(ge=1)] = 1
    """Number of processes of a generate function; more of them help if it computes much itself. Each has its own
    module variables. Only with `sampling.generate_isolation=process`.
    """

    generate_max_turns: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of answers that engines give to a generate function for one trajectory; further ones are empty,
    with the finish reason `length`. None: no limit but that of all tokens, `rollout.max_response_len`.
    """

    sample_filter_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that masks samples of a complete rollout: they are not trained, and
    their rewards still count in their groups. None: every sample is trained.
    """

    all_samples_process_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, called with all finished groups of a rollout, those that a filter
    dropped included. None: no function.
    """

    hook_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Maximum time of one call of a user filter or hook, or of `take` of a data source, in seconds; a longer one ends
    the run. A log function that takes longer is a warning.
    """

    custom_rollout_log_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that logs metrics of a rollout. If it returns true, only metrics
    that it added or changed are logged. None: built-in metrics only.
    """

    buffer_filter_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that selects which unfinished groups to continue. Needs
    `sampling.partial_rollout`. None: oldest first.
    """
