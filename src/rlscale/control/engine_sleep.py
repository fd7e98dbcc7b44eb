"""Engines that give back their memory while the trainer works, and take it back with its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlscale.protocols import Trainers
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import WeightVersion


async def send_weights(pool: EnginePool, trainers: Trainers, version: WeightVersion) -> None:
    """Brings the trainer's weights to all engines; those that rest have all their memory afterwards."""
    await pool.resume_memory("weights")
    await trainers.sync_weights(version)
    await pool.resume_memory("kv_cache")


@asynccontextmanager
async def resting(pool: EnginePool, trainers: Trainers, version: WeightVersion) -> AsyncIterator[None]:
    """Has engines that are at `version` rest inside, so that the trainer has their GPUs. Nothing may run on them."""
    await pool.release_memory()
    yield
    await send_weights(pool, trainers, version)
