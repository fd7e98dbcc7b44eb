"""Who may start, given which weights exist."""

import asyncio

from rlscale.types import WeightVersion


class VersionGate:
    """Holds generation back until the weights are new enough.

    Invariant: rollout r starts only once the engines hold version r - max_staleness or a newer one, so that no token is
    trained on more than `max_staleness` updates after it was made. The training loop is the only caller of `open`.

    Example:
        gate = VersionGate(0)
        await gate.wait_for(1)   # returns after somebody called gate.open(1)
    """

    def __init__(self, version: WeightVersion) -> None:
        self._version = version
        self._changed = asyncio.Condition()

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def wait_for(self, version: WeightVersion) -> WeightVersion:
        """The current version, once it is at least `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)
            return self._version

    async def open(self, version: WeightVersion) -> None:
        assert version >= self._version, "weights never go back"
        async with self._changed:
            self._version = version
            self._changed.notify_all()
