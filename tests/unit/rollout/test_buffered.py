"""Rollouts of the buffer service, read from a real file: order, outcomes, resumption, limits."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.checkpoint.pending_groups import load_dropped, load_groups, save_groups
from rlscale.config import RunConfig, load_config
from rlscale.control.producer import Producer, ProducerState
from rlscale.control.staleness import VersionGate
from rlscale.rollout.buffered import BufferedRollouts, TrajectoryLimits
from rlscale.services.buffer_store import BufferStore, StoredGroup
from rlscale.services.trajectory_record import parse_submission
from rlscale.types import Group
from tests.buffer_process import trajectory


class FileReader:
    """Reads from the store without HTTP."""

    def __init__(self, store: BufferStore) -> None:
        self.store = store
        self.submitted = asyncio.Event()

    def submit(self, *names: str, **changes: Any) -> None:
        for name in names:
            records = [trajectory(f"{name}-{i}", name, reward=float(i), **changes) for i in range(2)]
            self.store.submit(parse_submission(json.dumps(records).encode()))
        self.submitted.set()

    async def next_groups(self, *, position: int, number: int) -> list[dict[str, Any]]:
        while not (found := self.store.next_groups("run", task="math", size=2, position=position, number=number)):
            self.submitted.clear()
            await self.submitted.wait()
        return [as_json(group) for group in found]

    async def groups_at(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        return [as_json(group) for group in self.store.groups_at("run", positions)]


def as_json(group: StoredGroup) -> dict[str, Any]:
    bodies = [json.loads(body) for body in group.bodies]
    return {"position": group.position, "name": group.name, "trajectories": bodies}


@pytest.fixture
def reader(tmp_path: Path) -> FileReader:
    return FileReader(BufferStore(tmp_path / "file"))


def config(*overrides: str) -> RunConfig:
    given = ("batch.rollout_batch_size=4", "batch.n_samples_per_prompt=2", "buffer.url=http://127.0.0.1:8889")
    return load_config([*given, *overrides])


def names(groups: Sequence[Group]) -> list[str]:
    return [group.samples[0].metadata["buffer"]["group"] for group in groups]


class Loop:
    """A producer whose rollouts are trained on by `train`, as by the training loop."""

    def __init__(self, source: BufferedRollouts, *, first: int = 0, max_staleness: int = 0) -> None:
        self.gate = VersionGate(first)
        self.producer = Producer(source, self.gate, rollouts=range(first, 20), max_staleness=max_staleness)
        self.version = first

    async def train(self) -> list[Group]:
        rollout = await self.producer.next()
        self.page = self.producer.close_page(rollout)
        self.state = self.producer.state()
        self.version += 1
        await self.gate.open(self.version)
        return rollout.groups


async def run(loop: Loop, body: Any) -> None:
    task = asyncio.create_task(loop.producer.run())
    try:
        await asyncio.wait_for(body, 30)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_groups_are_trained_in_the_order_of_their_completion_and_have_outcomes(reader: FileReader) -> None:
    loop = Loop(BufferedRollouts(reader, config("rollout.max_staleness=1")), max_staleness=1)
    failure = {"cause": "tool", "message": "timeout"}
    reader.submit("a", "b", loss_mask=[1, 0, 1])
    failed = trajectory("f-1", "f", status="failed", reward=None, failure=failure)
    bodies = [trajectory("f-0", "f"), failed]
    reader.store.submit(parse_submission(json.dumps(bodies).encode()))

    async def body() -> None:
        waiting = asyncio.create_task(loop.train())
        while not reader.submitted.is_set() or loop.producer.num_ready:
            await asyncio.sleep(0)
        reader.submit("c", "d", "e")
        groups = await waiting
        # The group with one failure is below sampling.min_group_size=2, and another one has replaced it.
        assert names(groups) == ["a", "b", "c", "d"]
        assert groups[0].samples[1].loss_mask.tolist() == [1, 0, 1]
        assert [sample.reward for sample in groups[0].samples] == [0.0, 1.0]
        assert loop.page.counts["trained"] == 8
        assert loop.page.counts["failed/tool"] == loop.page.counts["dropped/min_group_size"] == 1

    await run(loop, body())


async def test_a_resumed_run_trains_the_same_groups_and_none_twice(reader: FileReader, tmp_path: Path) -> None:
    settings = config("rollout.max_staleness=2")
    reader.submit(*"abcdefghijklmnop")
    loop, trained = Loop(BufferedRollouts(reader, settings), max_staleness=2), list[list[str]]()
    states: list[ProducerState] = []

    async def body(loop: Loop, number: int) -> None:
        for _ in range(number):
            trained.append(names(await loop.train()))
            states.append(loop.state)

    await run(loop, body(loop, 3))
    assert [name for groups in trained for name in groups] == list("abcdefghijkl")
    for resumed_at in (1, 2):
        state = states[resumed_at - 1]
        folder = tmp_path / str(resumed_at)
        folder.mkdir()
        save_groups(folder, state.pending)
        source = BufferedRollouts(reader, settings)
        source.load_state_dict(json.loads(json.dumps(state.source)))
        again = Loop(source, first=resumed_at, max_staleness=2)
        again.producer.restore(load_groups(folder), load_dropped(folder))
        expected, trained = trained[resumed_at:3], []
        await run(again, body(again, 3 - resumed_at))
        assert trained == expected
        trained = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "j", "k", "l"]]


async def test_tokens_of_other_weights_than_the_rollout_allows_are_dropped(reader: FileReader) -> None:
    loop = Loop(BufferedRollouts(reader, config(), limits=TrajectoryLimits()))

    async def body() -> None:
        reader.submit("future", weight_versions=5)
        reader.submit(*"abcdefg")
        assert sorted(names(await loop.train())) == ["a", "b", "c", "d"]
        reader.submit(*"pqrs", weight_versions=[0, 1, 1], loss_mask=[0, 1, 1])
        assert sorted(names(await loop.train())) == ["p", "q", "r", "s"], "e, f and g are of version 0"

    await run(loop, body())


async def test_a_rollout_begins_with_the_ratio_and_has_all_that_arrived(reader: FileReader) -> None:
    loop = Loop(BufferedRollouts(reader, config("buffer.min_batch_collection_ratio=0.5")))

    async def body() -> None:
        reader.submit("a", "b")
        assert names(await loop.train()) == ["a", "b"]
        reader.submit(*"cdefgh", weight_versions=1)
        assert names(await loop.train()) == ["c", "d", "e", "f"], "at most batch.rollout_batch_size"

    await run(loop, body())


async def test_a_trajectory_beyond_the_limits_of_the_model_is_a_failure(reader: FileReader) -> None:
    source = BufferedRollouts(reader, config(), limits=TrajectoryLimits(vocab_size=5, max_tokens=4))
    reader.submit("a")
    (index, prompt), *_ = source.next_prompts(0)
    group = await source.group(index, prompt, oldest=0, newest=0)
    assert not group.samples
    assert [sample.reward for sample in group.failed] == [None, None]
    assert "must have token ids below 5, got 5" in str(group.failed[0].failure)
    assert source.reason_to_drop(group) == "min_group_size"


async def test_groups_are_read_once_when_a_place_opens_while_the_last_one_ends(reader: FileReader) -> None:
    source = BufferedRollouts(reader, config())
    prompts = source.next_prompts(0, 6)

    def open_place(index: int) -> "asyncio.Task[Group]":
        return asyncio.create_task(source.group(index, prompts[index][1], oldest=0, newest=None))

    async def run_ready_tasks() -> None:
        for _ in range(50):  # steps of the event loop, more than the tasks need until they wait for a group
            await asyncio.sleep(0)

    first = open_place(0)
    await run_ready_tasks()
    second = open_place(1)  # it starts after the stop, and before the reading task has noticed its end
    await source.stop([0])
    await run_ready_tasks()
    others = [open_place(index) for index in (2, 3, 4)]
    await run_ready_tasks()
    reader.submit("a", "b", "c", "d", "e")
    groups = await asyncio.wait_for(asyncio.gather(second, *others), 30)
    groups.append(await asyncio.wait_for(open_place(5), 30))
    assert names(groups) == ["a", "b", "c", "d", "e"]
    assert not (await first).samples
