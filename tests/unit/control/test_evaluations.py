"""Evaluations that run while the trainer works: what waits for them, the versions they state, and resumed runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlscale.control.evaluation_schedule import adopt_evaluation
from rlscale.control.loop_config import Progress
from tests.unit.control.simulation import NUM_PROMPTS, NUM_SAMPLES, Simulation, simulation, wait_iterations
from tests.unit.control.test_producer import until

FIRST = "eval-held_out-0"
"""Name of the requests for the first prompt of the evaluation set."""


def versions_evaluated(run: Simulation) -> list[str]:
    """Version of the engine at each request for the first prompt."""
    return [line.split()[-1] for line in run.engine.log if line.startswith(f"{FIRST} ")]


def spans(run: Simulation) -> dict[int, tuple[float, float, float]]:
    """By step: the version at the start of an evaluation, and the oldest and newest of its tokens."""
    names = ("eval/weight_version", "eval/held_out/version_min", "eval/held_out/version_max")
    found = {step: tuple(metrics.get(name, -1.0) for name in names) for step, metrics in run.sink.logged.items()}
    return {step: (a, b, c) for step, (a, b, c) in found.items() if a >= 0}


async def test_neither_updates_nor_checkpoints_wait_for_an_evaluation(tmp_path: Path) -> None:
    with simulation(
        tmp_path,
        staleness=2,
        num_rollouts=6,
        eval_prompts=2,
        eval_interval=4,
        save_interval=1,
        eval_concurrency=1,
    ) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        # These waits never end if training or a checkpoint waits for the evaluation.
        await until(lambda: len(run.trainers.history) >= 3)
        await until(lambda: (newest := run.store.latest()) is not None and newest.rollout_id >= 3)
        assert run.engine.version >= 2 and versions_evaluated(run) == ["v0"]
        now = run.engine.version
        run.engine.hangs_for.clear()
        progress = await task
    # The second prompt is answered by the weights of the time at which the first one is finished.
    assert spans(run)[0][:2] == (0.0, 0.0) and now <= spans(run)[0][2] <= 6
    assert progress.evaluated_version == 6 and not progress.evaluation_pending
    assert all("time/eval_wait_s" not in run.sink.logged[step] for step in range(5))
    assert run.trained_groups == list(range(6 * NUM_PROMPTS))


async def test_with_one_version_the_next_update_waits_and_generation_does_not(tmp_path: Path) -> None:
    with simulation(
        tmp_path, staleness=2, num_rollouts=4, eval_prompts=2, eval_interval=1, eval_versions=1, save_interval=1
    ) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: len(run.trainers.history) == 1)
        # This wait never ends if the evaluation blocks the producer.
        await until(lambda: run.prompts.position == 3 * NUM_PROMPTS)
        await wait_iterations(300)
        assert not any(line.startswith("sync") for line in run.engine.log), "weights changed during the evaluation"
        run.engine.hangs_for.clear()
        progress = await task
    assert versions_evaluated(run) == ["v0", "v1", "v2", "v3", "v4"]
    assert progress.evaluated_version == 4
    # The evaluation of a rollout is logged with its step, the one before the first rollout with step 0. Each measures
    # one version, so that there is no span.
    assert all("eval/reward_mean" in run.sink.logged[step] for step in range(4))
    assert {(low, high) for _, low, high in spans(run).values()} == {(-1.0, -1.0)}


async def test_an_update_waits_once_an_evaluation_has_the_maximum_of_versions(tmp_path: Path) -> None:
    with simulation(
        tmp_path, staleness=2, num_rollouts=6, eval_prompts=1, eval_interval=6, eval_versions=3, update_interval=1
    ) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: len(run.trainers.history) >= 3)
        await wait_iterations(300)
        assert [line.split()[1] for line in run.engine.log if line.startswith("sync")] == ["v1", "v2"]
        run.engine.hangs_for.clear()
        await task
    assert run.engine.version == 6


async def test_the_next_evaluation_starts_when_the_one_before_it_is_over(tmp_path: Path) -> None:
    with simulation(tmp_path, staleness=1, num_rollouts=12, eval_prompts=1, eval_interval=2) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: len(run.trainers.history) >= 5)
        assert versions_evaluated(run) == ["v0"], "one evaluation runs at a time"
        run.engine.hangs_for.clear()
        progress = await task
    later = [int(each[1:]) for each in versions_evaluated(run)[1:]]
    assert later[0] >= 5 and later[-1] == 12 == progress.evaluated_version
    assert sum("takes longer than eval.interval=2" in each for each in run.warnings) == 1


async def test_a_resumed_run_repeats_an_evaluation_that_a_checkpoint_did_not_wait_for(tmp_path: Path) -> None:
    values: dict[str, Any] = {"staleness": 1, "eval_prompts": 1, "eval_interval": 4, "save_interval": 1}
    with simulation(tmp_path, num_rollouts=8, **values) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: (newest := run.store.latest()) is not None and newest.rollout_id >= 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start = run.store.latest()
    assert start is not None and start.state["progress"]["evaluation_pending"]
    with simulation(tmp_path, num_rollouts=8, start=start, **values) as again:
        await again.trainers.load(start.folder)
        progress = await again.loop.run()
    first = start.rollout_id
    assert spans(again)[first - 1][0] == first and progress.first_eval == 1.0
    assert again.trained_groups == list(range(8 * NUM_PROMPTS))


async def test_a_resumed_run_does_not_repeat_an_evaluation_that_ended_after_the_checkpoint(tmp_path: Path) -> None:
    values: dict[str, Any] = {"staleness": 1, "eval_prompts": 1, "eval_interval": 4, "save_interval": 1}
    with simulation(tmp_path, num_rollouts=8, **values) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: (newest := run.store.latest()) is not None and newest.rollout_id >= 3)
        start = run.store.latest()
        run.engine.hangs_for.clear()
        await until(lambda: any("eval/reward_mean" in each for each in run.sink.logged.values()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        recorded = [{"step": step, **metrics} for step, metrics in run.sink.logged.items()]
    assert start is not None and start.state["progress"]["evaluation_pending"]
    progress = Progress(**start.state["progress"])
    adopt_evaluation(progress, recorded, stop_reward=None)
    assert (progress.evaluated_version, progress.first_eval) == (0, 1.0)


@pytest.mark.parametrize(
    ("flags", "record", "expected"),
    [
        ("pending", {"step": 3, "eval/reward_mean": 0.5, "eval/weight_version": 4.0}, (4, 0.5, False, False)),
        ("pending", {"step": 3, "eval/reward_mean": 0.7, "eval/weight_version": 4.0}, (4, 0.7, False, True)),
        ("pending overdue", {"step": 3, "eval/reward_mean": 0.5, "eval/weight_version": 4.0}, (4, 0.5, True, False)),
        ("pending overdue", {"step": 3, "eval/reward_mean": 0.5, "eval/weight_version": 5.0}, (5, 0.5, False, False)),
        # Of a rollout that is repeated, of the checkpoint, and not pending.
        ("pending", {"step": 5, "eval/reward_mean": 0.5, "eval/weight_version": 5.0}, (2, 0.1, True, False)),
        ("pending", {"step": 1, "eval/reward_mean": 0.5, "eval/weight_version": 2.0}, (2, 0.1, True, False)),
        ("", {"step": 3, "eval/reward_mean": 0.5, "eval/weight_version": 5.0}, (2, 0.1, False, False)),
    ],
)
def test_an_evaluation_is_adopted(flags: str, record: dict[str, float], expected: tuple[Any, ...]) -> None:
    progress = Progress(next_rollout=5, version=5, evaluated_version=2, last_eval=0.1)
    progress.evaluation_pending, progress.evaluation_overdue = "pending" in flags, "overdue" in flags
    adopt_evaluation(progress, [{"step": 0, "reward/mean": 1.0}, record], stop_reward=0.6)
    found = (progress.evaluated_version, progress.last_eval, progress.evaluation_pending, progress.stopped)
    assert found == expected


@pytest.mark.parametrize("versions", [None, 1])
async def test_an_aborted_answer_is_continued(tmp_path: Path, versions: int | None) -> None:
    with simulation(
        tmp_path, staleness=1, num_rollouts=2, eval_prompts=1, eval_interval=2, eval_versions=versions
    ) as run:
        run.engine.aborts_next = 1
        run.engine.pace = lambda: 1 if any(rid.startswith("eval") for rid in run.engine.running) else 3
        await run.loop.run()
    assert run.sink.logged[0]["eval/held_out/num_samples"] == 1
    assert any(line.startswith(f"{FIRST}-") for line in run.engine.log), "the rest of the answer is requested"


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (None, NUM_PROMPTS * NUM_SAMPLES)])
async def test_an_evaluation_requests_few_samples_at_once(tmp_path: Path, concurrency: int | None, most: int) -> None:
    with simulation(
        tmp_path, staleness=1, num_rollouts=3, eval_prompts=20, eval_interval=3, eval_concurrency=concurrency
    ) as run:
        run.engine.hangs_for = {f"eval-held_out-{number}" for number in range(20)}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: len(run.trainers.history) >= 2)
        assert sum(rid.startswith("eval") for rid in run.engine.running) == most
        run.engine.hangs_for.clear()
        await task


async def test_a_stop_reward_that_a_checkpoint_waits_for_ends_the_run_with_its_last_weights(tmp_path: Path) -> None:
    """The engines are behind the trainers then: the last evaluation measures the weights that the run exports."""
    values: dict[str, Any] = {"eval_prompts": 1, "eval_interval": 2, "eval_versions": 1, "save_interval": 1}
    with simulation(tmp_path, staleness=1, num_rollouts=8, update_interval=2, stop_reward=1.0, **values) as run:
        run.engine.hangs_for = {FIRST}
        task = asyncio.create_task(run.loop.run())
        await until(lambda: len(run.trainers.history) == 1)
        await wait_iterations(100)
        run.engine.hangs_for.clear()
        progress = await task
    assert progress.stopped and progress.next_rollout == 1
    assert versions_evaluated(run) == ["v0", "v1"] and progress.evaluated_version == progress.version == 1


class DeadUntilUpdate:
    """An engine that died while the trainers computed: it is up again with the next weights."""

    def __init__(self, run: Simulation) -> None:
        self._run, self._before = run, run.engine.version

    def is_down(self, index: int) -> bool:
        return False

    async def is_dead(self, index: int) -> bool:
        return self._run.engine.version == self._before

    async def recover(self, index: int) -> bool:
        await until(lambda: self._run.engine.version > self._before)
        return True


async def test_a_checkpoint_gives_up_an_evaluation_that_needs_the_next_weights(tmp_path: Path) -> None:
    values: dict[str, Any] = {"eval_prompts": 1, "eval_interval": 4, "eval_versions": 1, "save_interval": 1}
    with simulation(tmp_path, staleness=1, num_rollouts=4, update_interval=2, **values) as run:
        run.pool.set_handler(DeadUntilUpdate(run))
        run.engine.fails_for = FIRST
        task = asyncio.create_task(run.loop.run())
        # Ends only if the checkpoint of rollout 1, before the first update, does not wait for the evaluation.
        await until(lambda: task.done())
        progress = task.result()
    assert any("cancelled, because an engine died" in each for each in run.warnings)
    assert versions_evaluated(run) == ["v0", "v2", "v4"] and progress.evaluated_version == 4
