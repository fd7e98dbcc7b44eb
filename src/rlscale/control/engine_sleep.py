"""Weight sync for engines that release their GPU memory while the trainer works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlscale.protocols import Trainers
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import WeightVersion


async def send_weights(pool: EnginePool, trainers: Trainers, version: WeightVersion) -> None:
    """Sends the trainer's weights to all engines and resumes the memory of those that released it."""
    # The cache comes last: while the trainer sends, its own memory and the weights must fit on the GPU together.
    await pool.resume_memory("weights")
    await trainers.sync_weights(version)
    await pool.resume_memory("kv_cache")


@asynccontextmanager
async def released_engines(pool: EnginePool, trainers: Trainers, version: WeightVersion) -> AsyncIterator[None]:
    """Releases the memory of idle engines inside, and sends them `version` at the end."""
    await pool.release_memory()
    yield
    await send_weights(pool, trainers, version)
