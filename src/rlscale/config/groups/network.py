"""Group `network`: HTTP requests."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class NetworkConfig(ConfigGroup):
    """Requests to engines, rewards and the rollout buffer."""

    http_proxy: Annotated[str | None, Field(min_length=1)] = None
    """URL of the HTTP proxy, e.g. `http://10.0.0.1:3128`, for requests to servers that the run did not start: external
    engines, `reward.url` and `buffer.url`. Loopback addresses are requested directly. None: direct requests; the proxy
    variables of the environment are ignored.
    """

    use_distributed_post: bool = False
    """Send generation requests from processes on every node, `cluster.num_gpus_per_node` on each, instead of from the
    driver, which can run out of connections.
    """
