"""Group `buffer`: an external service that generates trajectories."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class BufferConfig(ConfigGroup):
    """Trajectories from an external rollout buffer service instead of the engines. Needs `buffer.url`."""

    url: Annotated[str | None, Field(min_length=1)] = None
    """URL of the rollout buffer service, e.g. `http://10.0.0.1:8889`. None: no service."""

    fetch_trajectory_retry_times: Annotated[int, Field(ge=-1)] = -1
    """Maximum number of retries when fetching trajectories. -1: no limit. No effect without `buffer.url`."""

    min_batch_collection_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the samples of a rollout that must have arrived before training on it. No effect without
    `buffer.url`.
    """

    task_type: Annotated[str, Field(min_length=1)] = "math"
    """Task type requested from the service. No effect without `buffer.url`."""
