"""Addresses of prefill and decode servers, and their registration with sglang-router.

driver ── /generate ──> router ──┬──> prefill server: computes the prompt and the first token
                                 │        └── KV cache, by the transfer backend ──┐
                                 └──> decode server: computes all other tokens <──┘

The router adds the host and the bootstrap port of the prefill server to both requests, and a number by which the two
servers find each other there. The answer is that of the decode server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlscale.config import RouterConfig, RouterPolicy
from rlscale.config.server_groups import ServerRole
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class SeparateAddress(EngineAddress):
    """Address of an engine that computes one part of a request."""

    role: ServerRole
    bootstrap_port: int | None = None  # of prefill servers, where decode servers ask for the KV cache


def separate_addresses(workers: Sequence[EngineAddress]) -> list[SeparateAddress]:
    """The workers that have a role: all of them, or none."""
    found = [worker for worker in workers if isinstance(worker, SeparateAddress)]
    assert len(found) in (0, len(workers)), "a router has either equal engines or prefill and decode servers"
    return found


def router_arguments(config: RouterConfig, workers: Sequence[SeparateAddress]) -> dict[str, Any]:
    """Arguments of sglang-router that name prefill and decode servers, in place of `worker_urls`."""
    prefill = [worker for worker in workers if worker.role == ServerRole.prefill]
    decode = [worker for worker in workers if worker.role == ServerRole.decode]
    return {
        "worker_urls": [],
        "pd_disaggregation": True,
        "prefill_urls": [[worker.url, worker.bootstrap_port] for worker in prefill],
        "decode_urls": [worker.url for worker in decode],
        "prefill_policy": str(policy_of(config.prefill_policy or config.policy, len(prefill))),
        "decode_policy": str(policy_of(config.decode_policy or config.policy, len(decode))),
    }


def count_workers(arguments: Mapping[str, Any]) -> int:
    """Number of engines that the arguments of a router name."""
    return sum(len(arguments.get(name, ())) for name in ("worker_urls", "prefill_urls", "decode_urls"))


def policy_of(policy: RouterPolicy, num_workers: int) -> RouterPolicy:
    """The policy over so many workers: sglang-router rejects `power_of_two` for fewer than two."""
    is_single = num_workers == 1 and policy == RouterPolicy.power_of_two
    return RouterPolicy.round_robin if is_single else policy


def worker_body(worker: EngineAddress) -> dict[str, Any]:
    """Body of the request that registers a worker with a running router."""
    if not isinstance(worker, SeparateAddress):
        return {"url": worker.url}
    port: dict[str, Any] = {} if worker.bootstrap_port is None else {"bootstrap_port": worker.bootstrap_port}
    return {"url": worker.url, "worker_type": str(worker.role), **port}
