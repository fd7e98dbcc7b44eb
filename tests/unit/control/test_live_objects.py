"""Objects that a run holds: their number does not depend on the number of steps, without any garbage collection."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import SamplingConfig
from rlscale.rollout.collector import Collector
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.group_filters import GroupFilters
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Sample, TrainBatch
from tests.unit.control.simulation import NUM_PROMPTS, simulation
from tests.unit.control.test_producer import until

KINDS = (Collector, Group, Sample, Trajectory, GenerateSession, TrainBatch, asyncio.Task, asyncio.Event)

VALUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {
        "filters": GroupFilters(dynamic=lambda group: group.index % 3 == 0 or "third"),
        "sampling": SamplingConfig(over_sampling_batch_size=2 * NUM_PROMPTS),
    },
    "partial": {
        "sampling": SamplingConfig(partial_rollout=True, over_sampling_batch_size=2 * NUM_PROMPTS),
        "length": lambda index: 2 + index % 7,
    },
}


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_objects() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, KINDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VALUES))
async def test_a_run_holds_as_many_objects_after_many_steps_as_after_a_few(tmp_path: Path, name: str) -> None:
    # A long run collects its garbage rarely (`rare_full_collections`), so that cycles of every step would pile up.
    values = VALUES[name] | {"eval_prompts": 2, "eval_interval": 4, "save_interval": 5}
    with simulation(tmp_path, staleness=1, num_rollouts=70, **values) as run, no_collections():
        task = asyncio.create_task(run.loop.run())
        found: list[Counter[str]] = []
        for number in (10, 60):
            await until(lambda number=number: len(run.trainers.history) >= number)  # type: ignore[misc]
            found.append(live_objects())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    # A few more or less are in flight, or in the buffer.
    grown = {kind: number - found[0][kind] for kind, number in found[1].items()}
    assert max(grown.values()) < 40, grown
