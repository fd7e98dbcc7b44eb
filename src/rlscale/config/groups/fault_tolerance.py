"""Group `fault_tolerance`: restarts of processes that die."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class FaultToleranceConfig(ConfigGroup):
    """Restarts within a run. Without them the first death ends the run; the same command resumes it."""

    enabled: bool = False
    """Restart processes that die: an engine alone, with the current weights; the trainers from the last checkpoint.
    Engines are also health-checked. Processes of a node that dies restart on others. false: the first death ends
    the run.
    """

    max_restarts: Annotated[int, Field(ge=0)] = 8
    """Maximum number of restarts of engines and trainers together; the next death ends the run."""

    wait_for_nodes_s: Annotated[float, Field(ge=0)] = 600.0
    """Time after the death of a node in which others must provide its GPUs, free ones or those of a node that joins, in
    seconds; then the run ends. Ten minutes are enough to replace a machine of a cloud or a pod.
    """

    health_check_interval_s: Annotated[float, Field(gt=0)] = 30.0
    """Interval between two health checks of an engine, in seconds."""

    health_check_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Timeout of a health check, in seconds; an engine that does not respond is restarted."""

    health_check_first_wait_s: Annotated[float, Field(ge=0)] = 300.0
    """Time without health checks after each start of an engine, in seconds."""
