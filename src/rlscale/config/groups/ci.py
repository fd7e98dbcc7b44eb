"""Group `ci`: assertions about a run, for tests of rlscale and of plug-ins."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CiConfig(ConfigGroup):
    """Assertions that end the run with an error where one does not hold."""

    enabled: Annotated[
        bool,
        Field(
            description="Check after every rollout what must hold: engines have the newest weight version, trainer and "
            "engine agree on logprobs (`debug.logprob_diff_warn` is the bound), and before the first step the policy "
            "has no KL to its reference."
        ),
    ] = False
    disable_kl_checker: Annotated[
        bool,
        Field(description="Leave out the check of the KL, for runs that start elsewhere than their reference."),
    ] = False
    metric_checker_key: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Metric that must have reached `ci.metric_checker_threshold` at least once when the run ends, "
            "e.g. `eval/reward_mean`. None: none.",
        ),
    ] = None
    metric_checker_threshold: Annotated[
        float | None,
        Field(description="Smallest value that `ci.metric_checker_key` must have reached. None: no check."),
    ] = None
