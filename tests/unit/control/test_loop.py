"""The loop with fakes: order of phases, staleness, the end of a run, metrics and checkpoints."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.architectures.architecture import ForwardCost
from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    MegatronConfig,
    RolloutConfig,
    RunConfig,
    TrainBackendName,
    TrainConfig,
)
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.observe.console import SilentConsole
from rlscale.observe.reporter import Observer
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.fixed_rollouts import FixedRollouts
from rlscale.types import (
    EngineAddress,
    Group,
    Prompt,
    Sample,
    SampleStatus,
    StepPlan,
    TrainBatch,
    TrainResult,
    WeightVersion,
)
from rlscale.weight_types import WeightSyncReport


class Journal(FixedRollouts):
    """Trainers, source, evaluator and sink in one; records the order of their calls."""

    has_rewards = True

    def __init__(
        self,
        *,
        eval_rewards: Sequence[float] = (),
        fail_at: int | None = None,
        written: asyncio.Event | None = None,
    ) -> None:
        self.written = written  # set when a background save is on disk; None: `save` writes everything itself
        self.events: list[str] = []
        self.phases: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self._eval_rewards, self._fail_at = list(eval_rewards), fail_at

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        return [(rollout_id, Prompt(index=0, text="a", token_ids=(1, 2)))]

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        self.events.append(f"rollout {index} v{oldest}")
        sample = Sample(index=index, group_index=index, prompt=prompt, seed=0)
        sample.append([3, 4], logprobs=[-1.0, -2.0], weight_versions=[oldest, oldest])
        sample.status, sample.reward = SampleStatus.completed, 0.5
        return Group(index=index, prompt=prompt, samples=[sample])

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": sum(event.startswith("rollout") for event in self.events)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("no checkpoint is loaded")

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        self.events.append(f"train on v{batch.weight_versions.max()}")
        if self._fail_at is not None and len(self.events) > self._fail_at:
            raise RuntimeError("the trainer broke")
        return TrainResult(steps=[{"loss": 1.0, "lr": 0.1}], metrics={"logprob_diff/mean": 0.0})

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        raise AssertionError("the loop does not connect")

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        self.events.append(f"sync v{version}")
        return WeightSyncReport(version=version, num_buckets=1, num_bytes=4, seconds=0.0)

    async def save(self, folder: Path) -> None:
        self.events.append("save")
        if self.written is None:
            (folder / "weights").write_text("here")
        self._folder = folder

    async def finish_saving(self) -> None:
        if self.written is not None:
            await self.written.wait()
            self.events.append("written")
            (self._folder / "weights").write_text("here")

    async def load(self, folder: Path) -> None:
        raise AssertionError("no checkpoint is loaded")

    async def export_hf(self, folder: Path) -> None:
        self.events.append(f"export {folder.name}")

    async def run(self, version: WeightVersion, measured: object = None, **_: object) -> dict[str, float]:
        self.events.append(f"eval v{version}")
        return {"eval/reward_mean": self._eval_rewards.pop(0) if self._eval_rewards else 0.0}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def rewind(self, step: int) -> None:
        raise AssertionError("no rollout is repeated")

    def close(self) -> None: ...


class PhaseConsole(SilentConsole):
    """Records the phases of the loop."""

    def __init__(self, phases: list[str]) -> None:
        self._phases = phases

    def phase(self, name: str) -> None:
        self._phases.append(name)


def build_loop(
    journal: Journal, folder: Path, *, num_rollouts: int = 2, staleness: int = 0, with_eval: bool = False, **values: Any
) -> TrainingLoop:
    saves_in_background = journal.written is not None
    cost: ForwardCost | None = values.get("forward_cost")
    balances = cost is not None
    run = RunConfig(
        batch=BatchConfig(rollout_batch_size=1, global_batch_size=1, num_steps_per_rollout=1, balance_data=balances),
        rollout=RolloutConfig(max_staleness=staleness),
        train=TrainConfig(
            backend=TrainBackendName.megatron if saves_in_background else TrainBackendName.fsdp,
            update_weights_interval=values.get("update_interval", 1),
        ),
        megatron=MegatronConfig(async_save=saves_in_background),
        eval=EvalConfig(
            interval=values.get("interval"),
            stop_reward=values.get("stop_reward"),
            skip_eval_before_train=values.get("skip_eval", False),
        ),
        checkpoint=CheckpointConfig(
            save_interval=values.get("save_interval"),
            save_final=values.get("save_final", False),
            save_hf=values.get("save_hf"),
        ),
    )
    per_epoch = values.get("rollouts_per_epoch")
    config = LoopConfig(run=run, num_rollouts=num_rollouts, rollouts_per_epoch=per_epoch, forward_cost=cost)
    observer = Observer(console=PhaseConsole(journal.phases), sinks=[journal], diff_limit=1.0)
    deps = LoopDeps(
        source=journal,
        trainers=journal,
        store=CheckpointStore(folder, keep_last=2),
        observer=observer,
        evaluator=journal if with_eval else None,  # type: ignore[arg-type]
        pool=EnginePool([HttpEngine(EngineAddress(name="engine 0", url="http://127.0.0.1:1"), timeout_s=1)]),
    )
    return TrainingLoop(config, deps, Progress())


async def test_without_staleness_both_sides_alternate(tmp_path: Path) -> None:
    journal = Journal()
    progress = await build_loop(journal, tmp_path).run()
    assert journal.events == [
        "rollout 0 v0", "train on v0", "sync v1",
        "rollout 1 v1", "train on v1", "sync v2",
    ]  # fmt: skip
    assert (progress.next_rollout, progress.version, progress.num_tokens) == (2, 2, 4)


async def test_balanced_batches_are_planned_with_the_cost_of_the_model(tmp_path: Path) -> None:
    journal = Journal()
    cost = ForwardCost(per_token=24, per_pair=2, per_logit_row=4)
    progress = await build_loop(journal, tmp_path, forward_cost=cost).run()
    assert [event for event in journal.events if event.startswith("train")] == ["train on v0", "train on v1"]
    assert progress.next_rollout == 2


async def test_labels_do_not_wait_for_a_weight_sync(tmp_path: Path) -> None:
    journal = Journal()
    journal.has_rewards = False
    progress = await build_loop(journal, tmp_path, num_rollouts=4, update_interval=3).run()
    assert [event for event in journal.events if event.startswith("sync")] == ["sync v3", "sync v4"]
    assert [event for event in journal.events if event.startswith("rollout")] == [f"rollout {i} v{i}" for i in range(4)]
    assert progress.next_rollout == 4


@pytest.mark.parametrize("staleness", [1, 2])
async def test_no_token_is_older_than_the_bound(tmp_path: Path, staleness: int) -> None:
    journal = Journal()
    await build_loop(journal, tmp_path, num_rollouts=6, staleness=staleness).run()
    trained = [int(event.split("v")[-1]) for event in journal.events if event.startswith("train")]
    assert len(trained) == 6
    assert all(step - version <= staleness for step, version in enumerate(trained))
    assert any(step > version for step, version in enumerate(trained)), "no rollout was made ahead"


async def test_the_end_of_an_epoch_ends_every_interval(tmp_path: Path) -> None:
    journal = Journal()
    every = {"interval": 5, "save_interval": 5, "with_eval": True, "rollouts_per_epoch": 3}
    await build_loop(journal, tmp_path, num_rollouts=7, **every).run()
    evaluated = [event for event in journal.events if event.startswith("eval")]
    assert evaluated == ["eval v0", "eval v3", "eval v5", "eval v6", "eval v7"]  # the last one at the end of the run
    assert [checkpoint.name for checkpoint in sorted(tmp_path.iterdir()) if checkpoint.is_dir()] == [
        "rollout_00000005",
        "rollout_00000006",
    ]
    without = Journal()
    await build_loop(without, tmp_path / "b", num_rollouts=3, with_eval=False, rollouts_per_epoch=2).run()
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())


async def test_evaluates_before_between_and_after(tmp_path: Path) -> None:
    journal = Journal(eval_rewards=[0.1, 0.4, 0.6])
    progress = await build_loop(journal, tmp_path, num_rollouts=3, with_eval=True, interval=2).run()
    assert [event for event in journal.events if event.startswith("eval")] == ["eval v0", "eval v2", "eval v3"]
    assert (progress.first_eval, progress.last_eval) == (0.1, 0.6)
    assert journal.logged[3]["eval/reward_mean"] == 0.6


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_evaluation_before_training_can_be_skipped(tmp_path: Path, staleness: int) -> None:
    journal = Journal()
    values: dict[str, Any] = {"staleness": staleness, "interval": 2, "skip_eval": True}
    await build_loop(journal, tmp_path, num_rollouts=3, with_eval=True, **values).run()
    assert [event for event in journal.events if event.startswith("eval")] == ["eval v2", "eval v3"]


async def test_stops_at_the_stop_reward_and_saves(tmp_path: Path) -> None:
    journal = Journal(eval_rewards=[0.1, 0.9])
    loop = build_loop(journal, tmp_path, num_rollouts=50, with_eval=True, interval=1, stop_reward=0.8, save_final=True)
    progress = await loop.run()
    assert progress.next_rollout == 1
    assert journal.events[-1] == "save"


async def test_checkpoints_contain_progress_and_data_position(tmp_path: Path) -> None:
    await build_loop(Journal(), tmp_path, num_rollouts=3, save_interval=1).run()
    newest = CheckpointStore(tmp_path, keep_last=2).latest()
    assert newest is not None
    assert newest.rollout_id == 3
    assert newest.state["source"] == {"rollouts": 3}
    assert Progress(**newest.state["progress"]).version == 3


async def test_an_export_is_named_by_its_rollout_only(tmp_path: Path) -> None:
    journal = Journal()
    await build_loop(journal, tmp_path, save_final=True, save_hf="{rollout_id}_{step}").run()
    assert [each for each in journal.events if each.startswith("export")] == ["export 2_{step}"]


async def test_a_background_save_is_a_checkpoint_once_it_is_on_disk(tmp_path: Path) -> None:
    written = asyncio.Event()
    journal = Journal(written=written)
    run = asyncio.create_task(build_loop(journal, tmp_path, num_rollouts=2, save_interval=1).run())
    while journal.phases.count("save") < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)  # a second save would begin before anything else can run
    # The next rollout is trained on; its save waits for the previous one.
    assert journal.events[-3:] == ["rollout 1 v1", "train on v1", "sync v2"]
    assert not list(tmp_path.glob("rollout_????????"))
    written.set()
    await run
    assert journal.events[-4:] == ["sync v2", "written", "save", "written"]
    newest = CheckpointStore(tmp_path, keep_last=2).latest()
    assert newest is not None and newest.rollout_id == 2 and newest.state["source"] == {"rollouts": 2}
    assert (newest.folder / "weights").read_text() == "here"


async def test_a_failure_of_the_trainer_ends_the_loop(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await build_loop(Journal(fail_at=3), tmp_path, num_rollouts=9).run()
    assert "the trainer broke" in str(caught.value.exceptions[0])


async def test_metrics_of_a_step_are_complete(tmp_path: Path) -> None:
    journal = Journal()
    await build_loop(journal, tmp_path, num_rollouts=1).run()
    metrics = journal.logged[0]
    assert metrics["reward/mean"] == 0.5
    assert metrics["response_len/mean"] == 2.0
    assert metrics["train/loss"] == 1.0
    assert metrics["weights/version"] == 1.0
    assert {"time/step_s", "time/rollout_s", "time/train_s", "time/sync_s"} <= metrics.keys()
    assert metrics["throughput/tokens_per_s"] > 0
