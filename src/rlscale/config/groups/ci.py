"""Group `ci`: checks of a run, for tests of rlscale and of plug-ins."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CiConfig(ConfigGroup):
    """Checks that end the run with an error if they fail."""

    enabled: bool = False
    """Check after every rollout that engines have the newest weight version and that logprobs of trainer and engine
    differ by at most `debug.logprob_diff_warn`, and before the first step that the KL between policy and reference is
    0.
    """

    disable_kl_checker: bool = False
    """Skip the KL check, for runs whose initial policy differs from the reference."""

    metric_checker_key: Annotated[str | None, Field(min_length=1)] = None
    """Metric that must reach `ci.metric_checker_threshold` at least once before the run ends, e.g. `eval/reward_mean`.
    None: no check.
    """

    metric_checker_threshold: float | None = None
    """Value that `ci.metric_checker_key` must reach. None: no check."""
