"""Balance of requests over engines, and rejection of answers of old weights."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlscale.errors import EngineError, WeightSyncError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession, SessionFactory, group_seed
from rlscale.rollout.group_age import reason_to_drop
from rlscale.rollout.group_generator import GroupGenerator, GroupSettings, _mask_earlier_versions
from rlscale.rollout.timeline import Timelines, clock_s
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Failure, Generation, Group, Prompt, Sample, SampleStatus, SamplingParams

PROMPT = Prompt(index=0, text="ab", token_ids=(1, 2), label="c")
PARAMS = SamplingParams(max_new_tokens=2, sampling_seed=5)


class SlowEngine:
    """Answers once `release` is set; counts the requested samples."""

    def __init__(self, name: str, version: int = 0) -> None:
        self.address = EngineAddress(name=name, url="http://127.0.0.1:1")
        self.version, self.num_requested, self.seeds = version, 0, list[int | None]()
        self.release = asyncio.Event()

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        self.num_requested += n
        self.seeds.append(params.sampling_seed)
        await self.release.wait()
        return [
            Generation(
                output_ids=[7, j],
                logprobs=[-0.5, -0.25],
                weight_versions=[self.version] * 2,
                finish_reason="stop" if j else "length",
                text="x",
                engine=self.address.name,
            )
            for j in range(n)
        ]


class NoScorer:
    """Leaves the samples without a reward."""

    async def score(
        self, samples: Sequence[Sample], *, key: str | None = None, source: str | None = None, on_scored: Any = None
    ) -> Mapping[int, Failure]:
        return {}


def pool_of(*engines: SlowEngine) -> EnginePool:
    return EnginePool(list[Any](engines))


async def let_others_run() -> None:
    """Returns when each task that can run has done so several times."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_request_goes_to_the_engine_with_the_fewest_in_flight() -> None:
    engines = SlowEngine("engine 0"), SlowEngine("engine 1")
    pool = pool_of(*engines)
    calls = [
        asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=n, rid=str(i), oldest=0, newest=0))
        for i, n in enumerate([4, 1, 1, 1])
    ]
    await asyncio.sleep(0)
    assert [engine.num_requested for engine in engines] == [4, 3]
    for engine in engines:
        engine.release.set()
    await asyncio.gather(*calls)


async def test_names_the_engine_whose_weights_are_stale() -> None:
    stale = SlowEngine("engine 1", version=3)
    stale.release.set()
    with pytest.raises(WeightSyncError, match=r"engine 1 must generate with weight version 4, got \[3\]"):
        await pool_of(stale).generate(PROMPT, PARAMS, n=1, rid="r", oldest=4, newest=4)


async def test_accepts_what_the_staleness_bound_allows() -> None:
    engine = SlowEngine("engine 0", version=3)
    engine.release.set()
    assert len(await pool_of(engine).generate(PROMPT, PARAMS, n=2, rid="r", oldest=2, newest=4)) == 2


async def test_a_group_contains_one_sample_for_each_answer() -> None:
    engine = SlowEngine("engine 0")
    engine.release.set()
    settings = GroupSettings(num_samples=3)
    group = await GroupGenerator(SessionFactory(pool_of(engine), PARAMS), NoScorer(), settings).run(
        6, PROMPT, versions=(0, 0)
    )
    assert [sample.index for sample in group.samples] == [18, 19, 20]
    assert [sample.seed - group.samples[0].seed for sample in group.samples] == [0, 1, 2]
    assert [sample.status for sample in group.samples] == ["truncated", "completed", "completed"]
    assert group.samples[1].tokens.tolist() == [1, 2, 7, 1]
    assert group.samples[1].loss_mask.tolist() == [1, 1]
    assert engine.seeds == [group.samples[0].seed]


async def test_the_calls_of_an_agent_are_generation_and_the_rest_is_its_own_code() -> None:
    engine, timelines = SlowEngine("engine 0"), Timelines(num_kept=8)

    async def agent(trajectory: Trajectory, session: GenerateSession) -> None:
        # As the gateway answers an agent in another process: the session of this process makes no request.
        began_s = clock_s()
        await asyncio.sleep(0.02)
        trajectory.extend([7], logprobs=[-1.0], weight_versions=[0], sampled=True)
        trajectory.turns[0].interval_s = (began_s, clock_s())
        await asyncio.sleep(0.02)
        trajectory.status = SampleStatus.completed

    sessions = SessionFactory(pool_of(engine), PARAMS, timelines=timelines)
    generator = GroupGenerator(sessions, NoScorer(), GroupSettings(num_samples=1, generate=agent))
    timelines.open([6])
    timelines.close(await generator.run(6, PROMPT, versions=(0, 0)), "trained")
    (group,) = timelines.close_page().groups
    kinds = [kind for kind, *_ in group["trajectories"][0]["spans"]]
    assert [kind for kind in kinds if kind != "queue"] == ["generate", "tool"]


def sample_of(index: int, *, versions: Sequence[int], status: SampleStatus, path: int = 0) -> Sample:
    """A path of trajectory `index` with one token of each version; -1 is a token of a tool."""
    sample = Sample(index=index, group_index=0, prompt=PROMPT, seed=index, path=path, status=status)
    sample.append([7] * len(versions), logprobs=[-1.0] * len(versions), weight_versions=versions)
    sample.loss_mask = (sample.weight_versions >= 0).astype(np.uint8)
    return sample


async def test_a_continued_group_trains_on_its_newest_weights_only() -> None:
    # One trajectory was finished by version 0, the other was aborted and is continued by version 1.
    completed = sample_of(0, versions=[0, 0], status=SampleStatus.completed)
    aborted = sample_of(1, versions=[0], status=SampleStatus.aborted)
    before = Group(index=0, prompt=PROMPT, samples=[completed, aborted])
    engine = SlowEngine("engine 0", version=1)
    engine.release.set()
    settings = GroupSettings(num_samples=2, mask_off_policy=True)
    generator = GroupGenerator(SessionFactory(pool_of(engine), PARAMS), NoScorer(), settings)
    group = await generator.run(0, PROMPT, versions=(1, 1), before=before)
    assert [sample.weight_versions.tolist() for sample in group.samples] == [[0, 0], [0, 1, 1]]
    assert [sample.loss_mask.tolist() for sample in group.samples] == [[0, 0], [0, 1, 1]]
    assert reason_to_drop(group, oldest=1) is None, "it need not be generated again"


def test_earlier_weights_are_those_of_the_trajectory() -> None:
    # Trajectory 0 was continued by version 1, and has forked: its first path has tokens of version 0 alone.
    completed = SampleStatus.completed
    samples = [
        sample_of(0, versions=[0, -1, 0], status=completed),
        sample_of(0, versions=[0, -1, 1], status=completed, path=1),
        sample_of(1, versions=[0, 0], status=completed),
        sample_of(2, versions=[], status=completed),
    ]
    _mask_earlier_versions(samples, is_continued=False)
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 0, 0], [0, 0, 1], [1, 1], []]


def test_seeds_differ_by_run_purpose_and_group() -> None:
    seeds = {group_seed(run, purpose, i) for run in (1, 2) for purpose in ("train", "eval-a") for i in range(50)}
    assert len(seeds) == 200
    assert group_seed(1, "train", 0) == group_seed(1, "train", 0)


async def test_drain_waits_for_running_requests_and_queues_new_ones() -> None:
    engine = SlowEngine("engine 0")
    pool = pool_of(engine)
    running = asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=2, rid="a", oldest=0, newest=0))
    await asyncio.sleep(0)
    drained = asyncio.create_task(pool.drain())
    await asyncio.sleep(0)
    held = [
        asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid=rid, oldest=0, newest=None))
        for rid in ("b", "c")
    ]
    await let_others_run()
    assert not drained.done() and engine.num_requested == 2
    engine.release.set()
    await running
    await drained
    await let_others_run()
    assert engine.num_requested == 2, "a request went to an engine whose weights are being changed"
    engine.version = 1
    pool.admit()
    assert [answer.weight_versions for (answer,) in await asyncio.gather(*held)] == [[1, 1], [1, 1]]


async def test_drain_of_an_idle_pool_returns_at_once() -> None:
    engine = SlowEngine("engine 0")
    engine.release.set()
    pool = pool_of(engine)
    await asyncio.wait_for(pool.drain(), timeout=5)
    held = asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="a", oldest=0, newest=0))
    await let_others_run()
    assert engine.num_requested == 0 and not held.done()
    pool.admit()
    assert len(await held) == 1


async def test_versions_without_an_upper_bound() -> None:
    engine = SlowEngine("engine 0", version=9)
    engine.release.set()
    assert await pool_of(engine).generate(PROMPT, PARAMS, n=1, rid="r", oldest=2, newest=None)
    with pytest.raises(WeightSyncError, match="weight versions from 10, got"):
        await pool_of(engine).generate(PROMPT, PARAMS, n=1, rid="r", oldest=10, newest=None)


class ReleasingEngine:
    """An engine that releases its memory, and may be gone."""

    def __init__(self, name: str) -> None:
        self.address = EngineAddress(name=name, url=f"http://{name.replace(' ', '-')}")
        self.is_gone = False
        self.calls: list[str] = []

    async def abort(self, rid: str | None = None) -> None:
        self._answer("abort")

    async def pause(self) -> None:
        self._answer("pause")

    async def resume(self) -> None:
        self._answer("resume")

    async def release_memory(self, tags: Sequence[str]) -> None:
        self._answer(f"release {' '.join(tags)}")

    async def resume_memory(self, tags: Sequence[str]) -> None:
        self._answer(f"resume {' '.join(tags)}")

    def _answer(self, call: str) -> None:
        if self.is_gone:
            raise EngineError(f"{self.address.name} must answer")
        self.calls.append(call)


class DeathReporter:
    """Reports one engine as dead; restarts none."""

    def __init__(self, dead: int) -> None:
        self._dead = dead

    def is_down(self, index: int) -> bool:
        return index == self._dead

    async def is_dead(self, index: int) -> bool:
        return index == self._dead

    async def recover(self, index: int) -> bool:
        raise AssertionError("this must not wait for an engine that waits for its weights")


async def test_living_engines_resume_the_memory_that_they_released() -> None:
    engines = [ReleasingEngine("engine 0"), ReleasingEngine("engine 1")]
    pool = EnginePool(list[Any](engines))
    await pool.release_memory()
    engines[1].is_gone = True
    with pytest.raises(EngineError, match="engine 1 must answer"):
        await pool.resume_memory("weights")
    pool.set_handler(DeathReporter(dead=1))
    await pool.abort()
    await pool.resume_memory("weights")
    await pool.resume_memory("kv_cache")
    assert engines[0].calls == [
        *["pause", "release weights kv_cache"],
        *["resume weights", "abort", "resume kv_cache", "resume"],
    ]
    await pool.resume_memory("weights")
    assert engines[0].calls[-1] == "resume"


async def test_a_release_does_not_wait_for_a_dead_engine() -> None:
    """Its weights would be sent to all engines, of which some have released theirs."""
    engines = [ReleasingEngine("engine 0"), ReleasingEngine("engine 1")]
    pool = EnginePool(list[Any](engines))
    engines[1].is_gone = True
    pool.set_handler(DeathReporter(dead=1))
    await pool.release_memory()
    assert engines[0].calls == ["pause", "release weights kv_cache"]
    assert pool.released == {"weights": {engines[0].address.url}, "kv_cache": {engines[0].address.url}}
    pool.set_handler(DeathReporter(dead=0))
    with pytest.raises(EngineError, match="engine 1 must answer"):
        await pool.release_memory()


async def test_a_restarted_engine_has_its_memory() -> None:
    old, new = ReleasingEngine("engine 0"), ReleasingEngine("engine 0")
    new.address = EngineAddress(name="engine 0", url="http://127.0.0.1:2")
    pool = EnginePool(list[Any]([old]))
    await pool.release_memory()
    pool.replace(0, new)  # type: ignore[arg-type]
    later = EnginePool(list[Any]([new]))
    later.released = pool.released
    await later.resume_memory("weights")
    assert new.calls == []


async def test_requests_that_a_dead_engine_holds_fail_at_once() -> None:
    pool = pool_of(SlowEngine("engine 0"), SlowEngine("engine 1"))
    held, other = (
        asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid=rid, oldest=0, newest=0))
        for rid in ("a", "b")
    )
    await asyncio.sleep(0)
    pool.drop_requests(0)
    with pytest.raises(EngineError, match="engine 0 died during a request"):
        await held
    assert not other.done()
    # Cancelled by its owner, not by the death of an engine.
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other


async def test_a_request_that_is_cancelled_in_the_moment_in_which_its_engine_dies_ends() -> None:
    """Its owner waits for its end: it must not wait for a restart, which an attempt that ends does not see."""
    pool = pool_of(SlowEngine("engine 0"))
    request = asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="a", oldest=0, newest=0))
    await asyncio.sleep(0)
    pool.drop_requests(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    # Reported twice, it is still no cancellation of the owner.
    dropped = asyncio.create_task(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="b", oldest=0, newest=0))
    await asyncio.sleep(0)
    pool.drop_requests(0)
    pool.drop_requests(0)
    with pytest.raises(EngineError, match="died during a request"):
        await dropped


class RecordingGate:
    """A gateway that notes its calls and the state of the pool."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self, *, waits_idle: bool) -> None:
        self.calls.append(f"pause {waits_idle}")

    async def resume(self) -> None:
        await asyncio.sleep(0)
        self.calls.append("resume")


async def test_a_drain_holds_the_requests_of_the_gateway_too() -> None:
    pool, gate = pool_of(SlowEngine("engine 0")), RecordingGate()
    pool.gateway = gate
    await pool.drain()
    assert gate.calls == ["pause True"]
    pool.admit()
    # The next pause comes after the resume of this one.
    await pool.drain()
    assert gate.calls == ["pause True", "resume", "pause True"]


async def test_a_gateway_without_engines_stalls_a_rollout() -> None:
    pool, rollout = pool_of(SlowEngine("engine 0")), asyncio.Event()
    task = asyncio.create_task(rollout.wait())
    pool.set_gateway_stall(True)
    assert not await pool.wait_unless_stalled(task), "the next weights may bring its engine up"
    pool.set_gateway_stall(False)
    rollout.set()
    assert await pool.wait_unless_stalled(task)
