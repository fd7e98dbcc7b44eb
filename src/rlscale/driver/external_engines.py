"""Engines that were started elsewhere: `rollout.engine=external`."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from rlscale.config import RunConfig, WeightChannelName, mixes_caches
from rlscale.config.addresses import proxy_for
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.errors import EngineError, Problem
from rlscale.hosts import is_loopback
from rlscale.types import EngineAddress

KEY = "rollout.external_engine_addrs"
TIMEOUT_S = 10.0


class ExternalEngines:
    """Has the interface of `RayEngines`, but starts, restarts and ends nothing.

    Args:
        addresses: of the servers, each `host:port`. Their API key is in the driver's environment, in the
            variable that `rlscale-serve` reads, too.
        proxy: `network.http_proxy`, for servers on other machines.
    """

    api_key = None
    named_actors: Sequence[tuple[str, Any]] = ()
    elastic = range(0)

    def __init__(self, addresses: Sequence[str], *, proxy: str | None = None) -> None:
        self._addresses = parse_addresses(addresses, proxy=proxy)
        self.names = [address.name for address in self._addresses]

    async def start(self) -> list[EngineAddress]:
        """The addresses, with the number of ranks that each server reports."""
        return list(await asyncio.gather(*[_with_ranks(address) for address in self._addresses]))

    def kill(self) -> None:
        """Does nothing: the servers keep running."""


def parse_addresses(given: Sequence[str], *, proxy: str | None = None) -> list[EngineAddress]:
    """One address for each `host:port`; with the proxy unless it is on this machine."""
    key = os.environ.get(API_KEY_VARIABLE) or None
    return [
        EngineAddress(
            name=f"engine {index} ({each})",
            url=f"http://{each}",
            api_key=key,
            proxy=proxy_for(f"http://{each}", proxy),
        )
        for index, each in enumerate(given)
    ]


def are_local(given: Sequence[str]) -> bool:
    """Whether all servers have loopback addresses, so that they run on the driver's machine."""
    return all(is_loopback(each.rpartition(":")[0].strip("[]")) for each in given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerNeeds:
    """Properties that a run needs of its servers."""

    # Requests keep their cache when the weights change: a prefix cache that they share would never be flushed.
    separate_caches: bool = False
    releases_memory: bool = False
    joins_groups: bool = False  # for the weight channel `process_group`

    @classmethod
    def of(cls, config: RunConfig) -> "ServerNeeds":
        return cls(
            separate_caches=mixes_caches(config.rollout),
            releases_memory=bool(config.cluster.offload_rollout),
            joins_groups=config.train.weight_channel == WeightChannelName.process_group,
        )

    def find_misfit(self, info: Mapping[str, Any]) -> tuple[str, str, str] | None:
        """Rule, value and advice for a server that lacks something; None: it fits."""
        if self.separate_caches and info.get("disable_radix_cache") is False:
            rule = "name servers without a shared prefix cache with rollout.pause_mode=in_place"
            fix = "start it with --disable-radix-cache, or set rollout.pause_mode=retract"
            return rule, "disable_radix_cache=False", fix
        if self.releases_memory and info.get("enable_memory_saver") is False:
            rule = "name servers that release their memory with cluster.offload_rollout"
            return rule, "enable_memory_saver=False", "start it with --enable-memory-saver, or remove the key"
        if self.joins_groups and int(info.get("pp_size", 1)) > 1:
            rule = "name servers without pipeline stages with train.weight_channel=process_group"
            return rule, f"pp_size={info['pp_size']}", "start it without stages, or set train.weight_channel=disk"
        return None


def check_servers(given: Sequence[str], needs: ServerNeeds, *, proxy: str | None = None) -> list[Problem]:
    """Problems of servers that do not answer or do not fit the run."""
    return asyncio.run(_check(parse_addresses(given, proxy=proxy), needs))


async def _check(addresses: Sequence[EngineAddress], needs: ServerNeeds) -> list[Problem]:
    infos = await asyncio.gather(*[_fetch_info(address) for address in addresses], return_exceptions=True)
    problems = []
    for address, info in zip(addresses, infos, strict=True):
        if isinstance(info, EngineError):
            fix = "start it, e.g. with rlscale-serve, or remove it"
            if isinstance(info.__cause__, aiohttp.ClientProxyConnectionError):
                fix = "start the proxy, or correct network.http_proxy"
            rule, value = "name servers that respond", f"{address.url} ({info})"
            problems.append(Problem(path=KEY, rule=rule, value=value, fix=fix))
        elif isinstance(info, BaseException):
            raise info
        elif (misfit := needs.find_misfit(info)) is not None:
            rule, found, fix = misfit
            problems.append(Problem(path=KEY, rule=rule, value=f"{address.url} ({found})", fix=fix))
    return problems


async def _with_ranks(address: EngineAddress) -> EngineAddress:
    info = await _fetch_info(address)
    # Every rank of tensor and pipeline parallelism joins the weight group.
    num_ranks = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
    return replace(address, num_ranks=num_ranks)


async def _fetch_info(address: EngineAddress) -> dict[str, Any]:
    engine = HttpEngine(address, timeout_s=TIMEOUT_S)
    try:
        return await engine.info()
    finally:
        await engine.close()
