"""Actors that form one world and are called alike."""

from collections.abc import Sequence
from typing import Any

import ray

from rlscale.cluster.ray_calls import settle

Call = tuple[str, "ray.ObjectRef[Any]"]
"""What was asked of an actor, under its name."""


class RankGroup:
    """The ranks of the policy's trainer, or of a critic with ranks of its own.

    Args:
        role: names the ranks, e.g. `actor rank 0`.
        actors: rank by rank.
    """

    def __init__(self, role: str, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self.names = [f"{role} rank {rank}" for rank in range(len(actors))]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        """Those that have not been ended."""
        return list(zip(self.names, self._actors, strict=True)) if self._actors else []

    async def setup(self) -> list[Call]:
        """Has all ranks join and load their models; none where there are no ranks."""
        if not self._actors:
            return []
        [(address, port)] = await settle([(self.names[0], self._actors[0].rendezvous.remote())])
        return self.calls("setup", address, port)

    def shared(self, argument: object) -> object:
        """An argument for every rank, put away once; a single rank is given it with the call, which takes less time."""
        return ray.put(argument) if len(self._actors) > 1 else argument

    def calls(self, method: str, *args: object) -> list[Call]:
        """Starts a method on every rank."""
        return [(name, getattr(actor, method).remote(*args)) for name, actor in self.named_actors]

    async def call(self, method: str, *args: object) -> Any:
        """The same to its end: what rank 0 answers. Raises the first failure of any rank."""
        return (await settle(self.calls(method, *args)))[0]

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
