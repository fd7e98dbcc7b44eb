"""Group `sampling`: which prompts are answered, and which answers are kept."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


@dataclass(kw_only=True)
class SamplingConfig(ConfigGroup):
    """Over-sampling, filters, partial rollouts and user code for generation."""

    over_sampling_batch_size: Annotated[
        int | None,
        Field(
            gt=0,
            description="Prompts submitted whenever fewer groups are in flight than a rollout still needs; at least "
            "`batch.rollout_batch_size`. None: `batch.rollout_batch_size`.",
        ),
    ] = None
    dynamic_filter_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own filter, `package.module:name`: called with each finished group, keeps or drops it "
            "(DAPO's dynamic sampling). None: every group is kept.",
        ),
    ] = None
    partial_rollout: Annotated[
        bool,
        Field(
            description="When a rollout is complete, keep the unfinished groups and go on with them in the next "
            "rollout, by its weights; false drops them."
        ),
    ] = False
    mask_offpolicy_in_partial_rollout: Annotated[
        bool,
        Field(
            description="Leave the tokens of such groups that earlier weights drew out of the loss. Needs "
            "`sampling.partial_rollout`."
        ),
    ] = False
    custom_generate_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own generation of one sample, `package.module:name`, e.g. turns with tools. None: one "
            "request to an engine.",
        ),
    ] = None
    custom_rollout_log_function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own metrics of a rollout, `package.module:name`; when it returns true they replace the "
            "usual ones. None: only the usual ones.",
        ),
    ] = None
    buffer_filter_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own choice of the buffered groups to go on with, `package.module:name`. None: the oldest "
            "first.",
        ),
    ] = None
