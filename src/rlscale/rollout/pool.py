"""The engines of a run as one: each request goes to the engine with the least in flight."""

from collections.abc import Sequence

from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import Generation, Prompt, SamplingParams, WeightVersion


class EnginePool:
    """Balances requests over engines and refuses answers from weights that should be gone.

    Invariant: every token that leaves the pool was made by a weight version inside [oldest, newest] of its request.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "a pool needs at least one engine"
        self.engines = tuple(engines)
        self._in_flight = [0] * len(self.engines)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, n: int, rid: str, oldest: WeightVersion, newest: WeightVersion
    ) -> list[Generation]:
        """`n` answers to `prompt`.

        Raises:
            WeightSyncError: an engine answered with weights outside [oldest, newest]; the message names it.
            EngineError: the engine refused or could not be reached.
        """
        chosen = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        self._in_flight[chosen] += n
        try:
            answers = await self.engines[chosen].generate(prompt.token_ids, params, n=n, rid=rid)
        finally:
            self._in_flight[chosen] -= n
        for answer in answers:
            _check_versions(answer, oldest=oldest, newest=newest)
        return answers

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


def _check_versions(answer: Generation, *, oldest: WeightVersion, newest: WeightVersion) -> None:
    wrong = {v for v in answer.weight_versions if not oldest <= v <= newest}
    if wrong:
        expected = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise WeightSyncError(
            f"{answer.engine} must answer with weight {expected}, got {sorted(wrong)}; "
            "its weights were not updated, so its samples would be trained on as if they were fresh"
        )
