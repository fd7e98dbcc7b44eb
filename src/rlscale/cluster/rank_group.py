"""Actors that form one world and get the same calls."""

from collections.abc import Sequence
from typing import Any

import ray

from rlscale.cluster.rank_actor import CONCURRENCY_GROUPS
from rlscale.cluster.ray_calls import gather_calls

Call = tuple[str, "ray.ObjectRef[Any]"]
"""A call of an actor, with the actor's name."""


class RankGroup:
    """The ranks of the policy's trainer, or of a critic with its own ranks.

    Args:
        role: names the ranks, e.g. `actor rank 0`.
        actors: rank by rank.
    """

    def __init__(self, role: str, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self.names = [f"{role} rank {rank}" for rank in range(len(actors))]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        """Actors that were not killed."""
        return list(zip(self.names, self._actors, strict=True)) if self._actors else []

    async def setup(self) -> list[Call]:
        """Calls that let all ranks join and load their models; empty without ranks."""
        if not self._actors:
            return []
        [(address, port)] = await gather_calls([(self.names[0], self._actors[0].call.remote("rendezvous"))])
        return self.calls("setup", address, port)

    def shared(self, argument: object) -> object:
        """An argument for every rank, stored once. A single rank gets it with the call, which is faster."""
        return ray.put(argument) if len(self._actors) > 1 else argument

    def calls(self, method: str, *args: object) -> list[Call]:
        """Starts a method of the worker on every rank."""
        options = {"concurrency_group": CONCURRENCY_GROUPS[method]} if method in CONCURRENCY_GROUPS else {}
        return [(name, actor.call.options(**options).remote(method, *args)) for name, actor in self.named_actors]

    async def call(self, method: str, *args: object) -> Any:
        """Runs a method on every rank; the result of rank 0. Raises the first failure of any rank."""
        return (await gather_calls(self.calls(method, *args)))[0]

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
