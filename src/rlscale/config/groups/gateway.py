"""Group `gateway`: the URL that agents send their requests to."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class GatewayConfig(ConfigGroup):
    """The gateway: chat APIs of OpenAI and Anthropic in front of the engines, with every token recorded.

    It starts with a run whose agents need it.
    """

    enabled: bool = False
    """Start the gateway also without agents, for a generate function of your own that opens sessions
    (`session.gateway`).
    """

    host: Annotated[str | None, Field(min_length=1)] = None
    """Address at which the gateway listens. None: loopback if the run has one node, else the address of the driver's
    node. No effect without a gateway.
    """

    port: Annotated[int | None, Field(ge=1, le=65535)] = None
    """Port of the gateway, e.g. for agents behind a firewall. None: a free one. No effect without a gateway."""
