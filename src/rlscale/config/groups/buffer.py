"""Group `buffer`: a service outside of the run that generates trajectories."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class BufferConfig(ConfigGroup):
    """Trajectories from a rollout buffer, a service of its own, instead of from the engines. Needs `buffer.url`."""

    url: Annotated[
        str | None,
        Field(min_length=1, description="Address of the service, e.g. `http://10.0.0.1:8889`. None: there is none."),
    ] = None
    fetch_trajectory_retry_times: Annotated[
        int,
        Field(ge=-1, description="How often fetching trajectories is tried again before the run fails. -1: for ever."),
    ] = -1
    min_batch_collection_ratio: Annotated[
        float,
        Field(gt=0, le=1, description="A rollout is trained on once this share of its samples has come."),
    ] = 1.0
    task_type: Annotated[
        str, Field(min_length=1, description="Name of the kind of task that the service is asked to generate.")
    ] = "math"
