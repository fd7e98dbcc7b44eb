"""Group `network`: HTTP requests."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class NetworkConfig(ConfigGroup):
    """Requests to engines and to rewards."""

    http_proxy: Annotated[str | None, Field(min_length=1)] = None
    """URL of the HTTP proxy for requests to engines that the run did not start. None: direct requests; the proxy
    variables of the environment are ignored.
    """

    use_distributed_post: bool = False
    """Send generation requests from Ray actors on every node instead of from the driver, which can run out of
    connections.
    """
