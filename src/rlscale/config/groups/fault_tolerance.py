"""Group `fault_tolerance`: going on when a worker dies."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class FaultToleranceConfig(ConfigGroup):
    """Restarts within a run. Without it the first death ends the run; starting the same command again resumes it."""

    enabled: Annotated[
        bool,
        Field(
            description="Restart what dies while the driver lives: an engine alone, with the current weights; the "
            "trainers from the last checkpoint. Engines are health-checked too. false: the first death ends the run."
        ),
    ] = False
    max_restarts: Annotated[
        int, Field(ge=0, description="Restarts of engines and trainers together after which the run fails.")
    ] = 8
    health_check_interval_s: Annotated[
        float, Field(gt=0, description="Time between two health checks of an engine, in seconds.")
    ] = 30.0
    health_check_timeout_s: Annotated[
        float,
        Field(gt=0, description="An engine that does not answer a check within this time is restarted, in seconds."),
    ] = 30.0
    health_check_first_wait_s: Annotated[
        float,
        Field(ge=0, description="Time after each start of an engine in which it is not checked, in seconds."),
    ] = 300.0
