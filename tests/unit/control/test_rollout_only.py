"""Rollouts without a trainer."""

import asyncio
from pathlib import Path

import pytest

from rlscale.control.loop_config import Progress
from rlscale.control.rollout_only import RolloutOnlyDeps, run_rollouts_only
from rlscale.errors import FailureShareError
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause
from tests.unit.control.simulation import simulation


@pytest.mark.parametrize("stop_after", [None, 2])
async def test_a_requested_stop_ends_the_run_after_its_rollout(tmp_path: Path, stop_after: int | None) -> None:
    with simulation(tmp_path, num_rollouts=4) as run:
        loop_deps = run.loop._deps
        deps = RolloutOnlyDeps(
            source=loop_deps.source, evaluator=None, observer=loop_deps.observer, pool=run.pool, stop=run.stop
        )
        progress = Progress()
        task = asyncio.create_task(run_rollouts_only(run.loop._config, deps, progress))
        if stop_after is None:
            await task
            expected = 4
        else:
            while progress.next_rollout < stop_after and not task.done():
                await asyncio.sleep(0)
            run.stop.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            (warning,) = [each for each in run.warnings if "SIGUSR1" in each]
            assert f"after rollout {progress.next_rollout - 1}" in warning
            expected = progress.next_rollout
            assert stop_after <= expected < 4
    assert sorted(run.sink.logged) == list(range(expected))
    assert len(run.pages) == expected


async def test_a_run_whose_environments_are_broken_stops_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlscale.rollout.group_generator.BACKOFF_S", 0.0)

    async def broken(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        return Failure(cause=FailureCause.environment, message="no level")

    with simulation(tmp_path, num_rollouts=2, generate=broken) as run:
        loop_deps = run.loop._deps
        deps = RolloutOnlyDeps(source=loop_deps.source, evaluator=None, observer=loop_deps.observer, pool=run.pool)
        with pytest.raises(FailureShareError, match="by cause environment; the last one: no level"):
            await run_rollouts_only(run.loop._config, deps, Progress())
