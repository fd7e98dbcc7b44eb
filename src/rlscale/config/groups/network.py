"""Group `network`: how requests travel."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class NetworkConfig(ConfigGroup):
    """Requests to engines and to rewards."""

    http_proxy: Annotated[
        str | None,
        Field(
            min_length=1,
            description="URL of the HTTP proxy through which engines that were started elsewhere are asked. None: "
            "they are asked directly, whatever the environment's proxy variables say.",
        ),
    ] = None
    use_distributed_post: Annotated[
        bool,
        Field(
            description="Send generation requests from Ray actors on every node instead of from the driver, whose "
            "connections may otherwise run out."
        ),
    ] = False
