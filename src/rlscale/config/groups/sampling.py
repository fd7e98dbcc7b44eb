"""Group `sampling`: over-sampling, filters and partial rollouts."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


@dataclass(kw_only=True)
class SamplingConfig(ConfigGroup):
    """Over-sampling, filters, partial rollouts and user code for generation."""

    # Number of groups in flight.
    over_sampling_batch_size: Annotated[int | None, Field(gt=0)] = None
    """Number of prompts to submit whenever fewer groups are in flight than the rollout still needs; at least
    `batch.rollout_batch_size`. None: `batch.rollout_batch_size`.
    """

    dynamic_filter_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own filter, `package.module:name`, called with each finished group; it keeps or drops the group (dynamic
    sampling of DAPO). None: all groups are kept.
    """

    partial_rollout: bool = False
    """When a rollout is complete, keep the unfinished groups and continue them in the next rollout with its weights.
    false: they are dropped.
    """

    mask_offpolicy_in_partial_rollout: bool = False
    """Mask the tokens of continued groups that earlier weights generated. Needs `sampling.partial_rollout`."""

    # User code.
    custom_generate_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that generates one sample, e.g. with tool calls. None: one request to
    an engine.
    """

    custom_rollout_log_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that logs metrics of a rollout. If it returns true, the built-in
    metrics are not logged. None: built-in metrics only.
    """

    buffer_filter_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that selects which unfinished groups to continue. Needs
    `sampling.partial_rollout`. None: oldest first.
    """
