"""Group `buffer`: an external service to which other processes submit trajectories."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class BufferConfig(ConfigGroup):
    """Trajectories from a rollout buffer service (`rlscale-buffer`) instead of the run's own requests to its engines.
    Needs `buffer.url`.
    """

    url: Annotated[str | None, Field(min_length=1)] = None
    """URL of the rollout buffer service, e.g. `http://10.0.0.1:8889`. Its key, if it has one, is in the environment
    variable RLSCALE_BUFFER_API_KEY. None: no service.
    """

    fetch_trajectory_retry_times: Annotated[int, Field(ge=-1)] = -1
    """Maximum number of retries in a row of a request that the service does not answer; then the run ends. -1: no
    limit. No effect without `buffer.url`.
    """

    min_batch_collection_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the groups of a rollout that must have arrived before training on it, with those that have arrived
    by then. No effect without `buffer.url`.
    """

    task_type: Annotated[str, Field(min_length=1, max_length=200)] = "math"
    """Task type whose trajectories the run reads; a service can have several. No effect without `buffer.url`."""
