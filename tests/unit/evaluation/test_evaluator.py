"""Evaluations whose trajectories fail: the means are those of the others, and too many failures are an error."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import BatchConfig, RunConfig, SamplingConfig
from rlscale.errors import EngineError, FailureShareError
from rlscale.evaluation import evaluator as module
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.load_sets import EvalSet
from rlscale.observe.evaluation_files import (
    EvaluationFiles,
    Measured,
    find_evaluations,
    read_about,
    read_records,
)
from rlscale.rollout import group_generator
from rlscale.rollout.generate_session import SessionFactory
from rlscale.types import Failure, FailureCause, Generation, Prompt, Sample, SamplingParams

NUM_PROMPTS, NUM_SAMPLES = 6, 2


class Engines:
    """Refuses the first `num_refused` requests of each group in `refused`."""

    def __init__(self, refused: Mapping[int, int] | None = None) -> None:
        self._left = dict(refused or {})
        self.rids: list[str] = []

    async def generate(self, ids: Sequence[int], params: SamplingParams, *, n: int, rid: str, **_: Any) -> list[Any]:
        self.rids.append(rid)
        group = int(rid.split("-")[2])
        if self._left.get(group, 0) > 0:
            self._left[group] -= 1
            raise EngineError("engine 0 could not be reached")
        return [
            Generation(
                output_ids=[group, j],
                logprobs=[0.0, 0.0],
                weight_versions=[3, 3],
                finish_reason="stop",
                text="x",
                engine="engine 0",
            )
            for j in range(n)
        ]


class Grader:
    """Rewards the second sample of a group; fails for the samples in `failing`."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self._failing = failing
        self.sources: set[str | None] = set()

    async def score(
        self, samples: Sequence[Sample], *, key: str | None = None, source: str | None = None
    ) -> dict[int, Failure]:
        self.sources.add(source)
        for sample in samples:
            sample.reward = float(sample.index % NUM_SAMPLES)
        failed = [sample.index for sample in samples if sample.index in self._failing]
        return {index: Failure(cause=FailureCause.grader, message=f"sample {index}: no") for index in failed}


def evaluator(engines: Engines, grader: Grader, **sampling: Any) -> Evaluator:
    prompts = [Prompt(index=i, text="1+1=", token_ids=(1, 2), label="2") for i in range(NUM_PROMPTS)]
    one = EvalSet(name="held_out", prompts=prompts, params=SamplingParams(max_new_tokens=4), num_samples=NUM_SAMPLES)
    config = RunConfig(batch=BatchConfig(rollout_batch_size=4), sampling=SamplingConfig(**sampling))
    pool: Any = engines

    def sessions(of: EvalSet) -> SessionFactory:
        return SessionFactory(pool, of.params, purpose=f"eval-{of.name}")

    rewards: Any = grader
    return Evaluator(
        sets=[one],
        sessions=sessions,
        rewards=lambda _: rewards,
        config=config,
    )


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_generator, "BACKOFF_S", 0.0)


async def test_without_failures_every_trajectory_counts() -> None:
    grader = Grader()
    found = await evaluator(Engines(), grader).run(3)
    assert found["eval/reward_mean"] == 0.5 and found["eval/held_out/pass@2"] == 1.0
    assert "eval/held_out/failed_share" not in found and found["eval/held_out/num_prompts"] == NUM_PROMPTS
    assert grader.sources == {"the evaluation set held_out"}
    assert found["eval/weight_version"] == 3 and found["eval/held_out/truncated_share"] == 0
    assert found["eval/held_out/num_samples"] == NUM_PROMPTS * NUM_SAMPLES
    low, high = found["eval/held_out/reward_ci_low"], found["eval/held_out/reward_ci_high"]
    assert 0 < low < 0.5 < high < 1 and found["eval/held_out/pass@2_ci_high"] == 1.0


async def test_samples_are_kept_with_the_version_and_the_settings_of_their_set(tmp_path: Path) -> None:
    made = evaluator(Engines(), Grader())
    made.keep_samples(EvaluationFiles(tmp_path, keep_last=None, resume_at=0))
    metrics = await made.run(3, Measured(version=40, num_rollouts=40, weights="model"))
    assert metrics["eval/weight_version"] == 40
    (folder,) = find_evaluations(tmp_path)
    about = read_about(folder)
    assert (about["version"], about["weights"], about["metrics"]) == (40, "model", metrics)
    records = list(read_records(folder / about["sets"]["held_out"]["file"]))
    assert sorted(record["row"] for record in records) == list(range(NUM_PROMPTS))
    assert {len(record["samples"]) for record in records} == {NUM_SAMPLES}
    assert records[0]["samples"][1]["reward"] == 1.0


async def test_an_evaluation_that_fails_keeps_nothing(tmp_path: Path) -> None:
    made = evaluator(Engines(), Grader(failing=range(99)))
    made.keep_samples(EvaluationFiles(tmp_path, keep_last=None, resume_at=0))
    with pytest.raises(BaseExceptionGroup):
        await made.run(3)
    assert find_evaluations(tmp_path) == [] and list((tmp_path / "evaluations").iterdir()) == []


async def test_prompts_in_flight_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES_IN_FLIGHT", 2 * NUM_SAMPLES)
    running = most = 0

    class Counting(Engines):
        async def generate(self, *arguments: Any, **options: Any) -> list[Any]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().generate(*arguments, **options)

    found = await evaluator(Counting(), Grader()).run(3)
    assert most == 2 and found["eval/held_out/num_prompts"] == NUM_PROMPTS


async def test_the_samples_of_every_set_are_dumped_with_failed_ones() -> None:
    dumped: list[tuple[int, dict[str, int]]] = []
    dumping = evaluator(Engines(), Grader(failing=[0, 2, 4]))
    dumping.set_dump(
        lambda version, sets: dumped.append(
            (version, {name: sum(len(g.samples) + len(g.failed) for g in groups) for name, groups in sets.items()})
        )
    )
    await dumping.run(3)
    assert dumped == [(3, {"held_out": NUM_PROMPTS * NUM_SAMPLES})]


async def test_a_failed_grader_takes_its_sample_out_of_the_means() -> None:
    found = await evaluator(Engines(), Grader(failing=[0, 2, 4])).run(3)
    assert found["eval/reward_mean"] == pytest.approx(6 / 9) and found["eval/held_out/failed_share"] == 3 / 12
    assert found["eval/held_out/pass@2"] == 1.0, "over the three groups of two samples"


async def test_a_refused_request_is_repeated_with_the_same_seed() -> None:
    engines = Engines(refused={1: 2})
    found = await evaluator(engines, Grader(), max_retries=2).run(3)
    assert found == await evaluator(Engines(), Grader()).run(3)
    assert sorted(engines.rids).count("eval-held_out-1") == 3


async def test_an_engine_that_always_refuses_fails_the_trajectories_of_its_prompt() -> None:
    found = await evaluator(Engines(refused={1: 9}), Grader(), max_retries=1).run(3)
    assert found["eval/reward_mean"] == 0.5 and found["eval/held_out/failed_share"] == 2 / 12


async def test_more_failures_than_the_limit_end_the_run_with_their_cause() -> None:
    grader = Grader(failing=range(5))
    with pytest.raises(BaseExceptionGroup) as caught:
        await evaluator(Engines(), grader, max_failed_share=0.3).run(3)
    error = caught.value.exceptions[0]
    assert isinstance(error, FailureShareError)
    assert "of 12 trajectories of the evaluation set held_out failed, 4 by cause grader" in str(error)


async def test_a_set_without_any_reward_has_no_mean() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await evaluator(Engines(), Grader(failing=range(99)), max_failed_share=1.0).run(3)
    assert "12 of 12 trajectories of the evaluation set held_out failed" in str(caught.value.exceptions[0])
