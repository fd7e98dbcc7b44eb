"""The engines of a run as one: each request goes to the engine with the least in flight."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import Generation, Prompt, SamplingParams, WeightVersion

log = logging.getLogger(__name__)


class EngineRecovery(Protocol):
    """Who brings dead engines back. Engines go by their place in the pool."""

    def is_down(self, index: int) -> bool:
        """True from the death of an engine until it holds the current weights again."""
        ...

    async def died(self, index: int) -> bool:
        """Whether an engine is dead, or is just being brought back."""
        ...

    async def recover(self, index: int) -> bool:
        """Returns True once a dead engine is back, False when it was not dead."""
        ...


class EnginePool:
    """Balances requests over engines and refuses answers from weights that should be gone.

    `drain` and `admit` enclose a weight update that no request may see.

    Invariant: every token that leaves the pool was made by a weight version inside [oldest, newest] of its request.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "a pool needs at least one engine"
        self.engines = list(engines)
        self._retired: list[Engine] = []
        self._recovery: EngineRecovery | None = None
        self._in_flight = [0] * len(self.engines)
        self._admits, self._idle = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._idle.set()
        self._stalled, self._num_stalled = asyncio.Event(), 0
        # Addresses of the engines without memory for something; those of an earlier pool may be put here. An engine
        # that was started anew has another one, and all its memory.
        self.released: dict[str, set[str]] = {"weights": set(), "kv_cache": set()}

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        n: int,
        rid: str,
        oldest: WeightVersion,
        newest: WeightVersion | None,
    ) -> list[Generation]:
        """`n` answers to `prompt`.

        Args:
            newest: None accepts every version from `oldest` on: weights may be updated while the request runs.

        Raises:
            WeightSyncError: an engine answered with weights outside [oldest, newest]; the message names it.
            EngineError: the engine refused or could not be reached.
        """
        while True:
            while not self._admits.is_set():
                await self._admits.wait()
            index = self._choose()
            engine = self.engines[index]
            try:
                answers = await self._ask(index, prompt, params, n=n, rid=rid)
                break
            except EngineError:
                # Not a fault of the request when its engine died: asked again it gets what it would have got.
                if not await self._came_back(index, engine):
                    raise
        for answer in answers:
            _check_versions(answer, oldest=oldest, newest=newest)
        return answers

    def guard(self, recovery: EngineRecovery) -> None:
        """From now on requests wait for engines that `recovery` brings back."""
        self._recovery = recovery

    def replace(self, index: int, engine: Engine) -> None:
        """Puts the client of a restarted engine in the place of the old one."""
        self._retired.append(self.engines[index])
        self.engines[index] = engine

    def _choose(self) -> int:
        """The engine with the least in flight, among those that are up when there are any."""
        recovery, everyone = self._recovery, range(len(self.engines))
        up = everyone if recovery is None else [i for i in everyone if not recovery.is_down(i)]
        return min(up or everyone, key=self._in_flight.__getitem__)

    async def _ask(self, index: int, prompt: Prompt, params: SamplingParams, *, n: int, rid: str) -> list[Generation]:
        self._in_flight[index] += n
        self._idle.clear()
        try:
            if self._recovery is not None and self._recovery.is_down(index):
                raise EngineError(f"{self.engines[index].address.name} is being restarted")
            return await self.engines[index].generate(prompt.token_ids, params, n=n, rid=rid)
        finally:
            self._in_flight[index] -= n
            if not any(self._in_flight):
                self._idle.set()

    async def _came_back(self, index: int, engine: Engine) -> bool:
        """Whether a request that failed on `engine` is worth another try: the engine was, or now is, another one."""
        if self._recovery is None:
            return False
        self._num_stalled += 1
        self._stalled.set()
        try:
            return await self._recovery.recover(index) or self.engines[index] is not engine
        finally:
            self._num_stalled -= 1
            if not self._num_stalled:
                self._stalled.clear()

    async def stalled(self) -> None:
        """Returns when a request waits for an engine to come back."""
        await self._stalled.wait()

    async def drain(self) -> None:
        """Holds new requests back until `admit`, and returns when none is running any more."""
        self._admits.clear()
        await self._idle.wait()

    def admit(self) -> None:
        """Lets requests through again, in the order they came."""
        self._admits.set()

    async def release_memory(self) -> None:
        """Has every engine give back the memory of weights and cache. Nothing may run."""
        await asyncio.gather(*[self._release(index) for index in range(len(self.engines))])

    async def resume_memory(self, tag: str) -> None:
        """Has engines take back `weights`, which must then be sent to them, or `kv_cache`, and then generate."""
        urls = [engine.address.url for engine in self.engines]
        await asyncio.gather(*[self._resume(i, tag) for i, url in enumerate(urls) if url in self.released[tag]])
        self.released[tag].clear()

    async def abort(self) -> None:
        """Ends every running request, as far as engines answer."""
        await asyncio.gather(*[_abort(engine) for engine in self.engines])

    async def _resume(self, index: int, tag: str) -> None:
        engine = self.engines[index]
        try:
            await engine.resume_memory([tag])
            if tag == "kv_cache":
                await engine.resume()
        except EngineError:
            # One that died is started again, and has all its memory.
            if self._recovery is None or not await self._recovery.died(index):
                raise

    async def _release(self, index: int) -> None:
        engine = self.engines[index]
        try:
            await engine.pause()
            await engine.release_memory(list(self.released))
        except EngineError:
            # One that died is started again, and has all its memory.
            if not await self._came_back(index, engine):
                raise
            return
        for urls in self.released.values():
            urls.add(engine.address.url)

    async def close(self) -> None:
        for engine in (*self.engines, *self._retired):
            await engine.close()


async def _abort(engine: Engine) -> None:
    try:
        await engine.abort()
    except EngineError as error:
        log.info("no request was ended: %s", error)  # one that died has none; what else is wrong shows at the next call


def _check_versions(answer: Generation, *, oldest: WeightVersion, newest: WeightVersion | None) -> None:
    wrong = {v for v in answer.weight_versions if v < oldest or (newest is not None and v > newest)}
    if wrong:
        upper = "" if newest is None else f" to {newest}"
        expected = f"version {newest}" if oldest == newest else f"versions from {oldest}{upper}"
        raise WeightSyncError(
            f"{answer.engine} must answer with weight {expected}, got {sorted(wrong)}; "
            "its weights were not updated, so its samples would be trained on as if they were fresh"
        )
