"""Engines that were started elsewhere: `rollout.engine=external`."""

import asyncio
import ipaddress
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.server.http_server import API_KEY_VARIABLE
from rlscale.errors import EngineError, Problem
from rlscale.types import EngineAddress

KEY = "rollout.external_engine_addrs"
TIMEOUT_S = 10.0


class ExternalEngines:
    """Has the interface of `RayEngines`, but starts, restarts and ends nothing.

    Args:
        addresses: of the servers, each `host:port` or a URL. Their API key is in the driver's environment, in the
            variable that `rlscale-serve` reads, too.
    """

    api_key = None
    named_actors: Sequence[tuple[str, Any]] = ()

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = parse_addresses(addresses)
        self.names = [address.name for address in self._addresses]

    async def start(self) -> list[EngineAddress]:
        """The addresses, with the number of ranks that each server reports."""
        return list(await asyncio.gather(*[_with_ranks(address) for address in self._addresses]))

    def kill(self) -> None:
        """Does nothing: the servers keep running."""


def parse_addresses(given: Sequence[str]) -> list[EngineAddress]:
    """One address for each `host:port` or URL."""
    key = os.environ.get(API_KEY_VARIABLE) or None
    urls = [each if "://" in each else f"http://{each}" for each in given]
    return [
        EngineAddress(name=f"engine {index} ({urlsplit(url).netloc})", url=url.rstrip("/"), api_key=key)
        for index, url in enumerate(urls)
    ]


def are_local(given: Sequence[str]) -> bool:
    """Whether all servers have loopback addresses, so that they run on the driver's machine."""
    return all(_is_loopback(urlsplit(address.url).hostname or "") for address in parse_addresses(given))


def check_servers(given: Sequence[str], *, mixes_caches: bool = False) -> list[Problem]:
    """Problems of servers that do not answer or do not fit the run.

    Args:
        mixes_caches: whether requests keep their cache when the weights change. A prefix cache that requests share
            would then never be flushed and mix ever older weights.
    """
    return asyncio.run(_check(parse_addresses(given), mixes_caches=mixes_caches))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _check(addresses: Sequence[EngineAddress], *, mixes_caches: bool) -> list[Problem]:
    infos = await asyncio.gather(*[_fetch_info(address) for address in addresses], return_exceptions=True)
    problems = []
    for address, info in zip(addresses, infos, strict=True):
        if isinstance(info, EngineError):
            fix = "start it, e.g. with rlscale-serve, or remove it"
            rule, value = "name servers that respond", f"{address.url} ({info})"
        elif isinstance(info, BaseException):
            raise info
        elif mixes_caches and info.get("disable_radix_cache") is False:
            fix = "start it with --disable-radix-cache, or set rollout.pause_mode=retract"
            rule = "name servers without a shared prefix cache with rollout.pause_mode=in_place"
            value = f"{address.url} (disable_radix_cache=False)"
        else:
            continue
        problems.append(Problem(path=KEY, rule=rule, value=value, fix=fix))
    return problems


async def _with_ranks(address: EngineAddress) -> EngineAddress:
    info = await _fetch_info(address)
    # Every rank of tensor and pipeline parallelism joins the weight group.
    num_ranks = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
    return EngineAddress(name=address.name, url=address.url, api_key=address.api_key, num_ranks=num_ranks)


async def _fetch_info(address: EngineAddress) -> dict[str, Any]:
    engine = HttpEngine(address, timeout_s=TIMEOUT_S)
    try:
        return await engine.info()
    finally:
        await engine.close()
