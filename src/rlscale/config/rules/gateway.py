"""Rules about the gateway."""

from __future__ import annotations

import ipaddress

from rlscale.config.rules.agent import runs_agents
from rlscale.config.rules.conditions import is_sft, reads_buffer, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


def needs_gateway(config: RunConfig) -> bool:
    """Whether the run starts a gateway."""
    return (config.gateway.enabled or runs_agents(config)) and can_have_gateway(config)


def can_have_gateway(config: RunConfig) -> bool:
    """Whether the run generates samples itself."""
    return uses_engines(config) and not is_sft(config) and not reads_buffer(config)


@rule
def gateway_host_is_an_address(config: RunConfig) -> list[Problem]:
    """Agents get this address, so it cannot be that of all interfaces."""
    host = config.gateway.host
    if host is None or not needs_gateway(config) or _is_one_address(host):
        return []
    fix = "write the address at which agents reach the driver's node, or remove it"
    return [Problem(path="gateway.host", rule="be the address of one interface", value=host, fix=fix)]


def _is_one_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return bool(host.strip()) and not any(each in host for each in "/ :@")


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("gateway",),
        when=lambda config: not can_have_gateway(config),
        why="the run generates no samples",
    ),
    IgnoredKey(
        names=("gateway.host", "gateway.port"),
        when=lambda config: not needs_gateway(config),
        why="the run has no gateway",
    ),
)
