"""Group `debug`: alarms."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.group import ConfigGroup


@dataclass(kw_only=True)
class DebugConfig(ConfigGroup):
    """Alarms of a run."""

    logprob_diff_warn: Annotated[
        float | None,
        Field(
            gt=0,
            description="Warn when the mean absolute difference of trainer and engine logprobs is above this. None: "
            "1e-4 with `train.dtype=float32`, 0.05 with `bfloat16`.",
        ),
    ] = None
    save_rollout_data: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Write every sample of each rollout to this JSONL file, with `{rollout_id}` in its name. None: "
            "no such files.",
        ),
    ] = None
