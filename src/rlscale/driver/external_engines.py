"""Engines that somebody else started: `rollout.engine=external`."""

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
    """Looks like `RayEngines` to a run that needs addresses only: nothing is started, restarted or ended.

    Args:
        addresses: of the servers, each `host:port` or a URL. Their key is in the driver's environment, under the name
            that `rlscale-serve` reads too.
    """

    api_key = None
    named_actors: Sequence[tuple[str, Any]] = ()

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = external_addresses(addresses)
        self.names = [address.name for address in self._addresses]

    async def start(self) -> list[EngineAddress]:
        """The addresses, with the number of ranks that each server tells."""
        return list(await asyncio.gather(*[_with_ranks(address) for address in self._addresses]))

    def kill(self) -> None:
        """Leaves the servers as they are."""


def external_addresses(given: Sequence[str]) -> list[EngineAddress]:
    """One address for each `host:port` or URL."""
    key = os.environ.get(API_KEY_VARIABLE) or None
    urls = [each if "://" in each else f"http://{each}" for each in given]
    return [
        EngineAddress(name=f"engine {index} ({urlsplit(url).netloc})", url=url.rstrip("/"), api_key=key)
        for index, url in enumerate(urls)
    ]


def are_local(given: Sequence[str]) -> bool:
    """Whether all servers are reached by loopback, so that they run on the driver's machine."""
    return all(_is_loopback(urlsplit(address.url).hostname or "") for address in external_addresses(given))


def check_servers(given: Sequence[str], *, mixes_caches: bool = False) -> list[Problem]:
    """Every server that does not answer, or does not fit.

    Args:
        mixes_caches: whether weights change under requests that keep their cache. A cache that requests share is then
            never dropped and would grow ever older.
    """
    return asyncio.run(_check(external_addresses(given), mixes_caches=mixes_caches))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _check(addresses: Sequence[EngineAddress], *, mixes_caches: bool) -> list[Problem]:
    infos = await asyncio.gather(*[_info(address) for address in addresses], return_exceptions=True)
    problems = []
    for address, info in zip(addresses, infos, strict=True):
        if isinstance(info, EngineError):
            fix = "start it, e.g. with rlscale-serve, or leave it out"
            rule, value = "name servers that answer", f"{address.url} ({info})"
        elif isinstance(info, BaseException):
            raise info
        elif mixes_caches and info.get("disable_radix_cache") is False:
            fix = "start it with --disable-radix-cache, or set rollout.pause_mode=retract"
            rule = "name servers without a shared cache of prompts where rollout.pause_mode=in_place"
            value = f"{address.url} (disable_radix_cache=False)"
        else:
            continue
        problems.append(Problem(path=KEY, rule=rule, value=value, fix=fix))
    return problems


async def _with_ranks(address: EngineAddress) -> EngineAddress:
    info = await _info(address)
    num_ranks = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
    return EngineAddress(name=address.name, url=address.url, api_key=address.api_key, num_ranks=num_ranks)


async def _info(address: EngineAddress) -> dict[str, Any]:
    engine = HttpEngine(address, timeout_s=TIMEOUT_S)
    try:
        return await engine.info()
    finally:
        await engine.close()
