"""Rules about HTTP requests."""

from __future__ import annotations

from rlscale.config.addresses import is_plain_url, public_url
from rlscale.config.rules.conditions import (
    asks_teachers,
    reads_buffer,
    scores_samples,
    uses_engines,
    uses_external_engines,
)
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def proxy_is_a_url(config: RunConfig) -> list[Problem]:
    proxy = config.network.http_proxy
    if proxy is None or (is_plain_url(proxy) and proxy.startswith("http://")):
        return []
    rule, fix = "be http://<host>:<port>", "write e.g. http://10.0.0.1:3128"
    return [Problem(path="network.http_proxy", rule=rule, value=public_url(proxy), fix=fix)]


def uses_proxy(config: RunConfig) -> bool:
    """Whether the run sends requests to servers that it did not start."""
    asks_servers = uses_external_engines(config) and uses_engines(config)
    asks_servers |= asks_teachers(config)
    return asks_servers or reads_buffer(config) or (config.reward.url is not None and uses_engines(config))


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("network.http_proxy",),
        when=lambda config: not uses_proxy(config),
        why="the run sends no request to servers that it did not start",
    ),
    IgnoredKey(
        names=("network.use_distributed_post",),
        when=lambda config: not scores_samples(config),
        why="the run sends no generation requests",
    ),
)
