"""A critic on dedicated ranks compared with one on the policy's ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlscale.config import BatchConfig, OffloadMode
from rlscale.errors import WorkerError
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.spec import CriticSpec, DedicatedRanks, ModelSource, OffloadSpec, TrainerSpec
from rlscale.types import TrainBatch, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec, tiny_model

pytestmark = pytest.mark.usefixtures("world")

Cut = Sequence[Sequence[Sequence[int]]]
BATCHES = [make_batch(RAGGED, seed=seed) for seed in range(3)]
TWO_STEPS: list[Cut] = [[[[0, 1, 2], [3]]], [[[4, 5], [6, 7]]]]
OTHER_CUT: list[Cut] = [[[[0, 2], [1], [3]]], [[[7, 4, 5], [6]]]]
DEDICATED = DedicatedRanks(number=1, batch=BatchConfig(rollout_batch_size=2, n_samples_per_prompt=4))


def spec_of(model_path: str, *, own: DedicatedRanks | None, reference: str | None = None, **critic: Any) -> TrainerSpec:
    algo = {"advantage_estimator": "ppo", "lambd": 0.9, "kl_coef": 0.2, "kl_loss_type": "k2"}
    return spec(
        model_path,
        algo=algo,
        ref_path=reference or model_path,
        critic=CriticSpec(**{"source": ModelSource(path=model_path), "lr": 4e-3, "dedicated_ranks": own, **critic}),
        adam_eps=1e-4,  # with a small eps Adam would turn the rounding of vanishing gradients into full steps
    )


class SeparateBackends:
    """Policy and critic as two backends, called as by the controller."""

    def __init__(self, made: TrainerSpec) -> None:
        self.policy = FsdpBackend(made, rank=0, world_size=1)
        self.critic = FsdpCriticBackend(made, rank=0, world_size=1)

    def train(self, batch: TrainBatch, cuts: Sequence[Cut], *, critics: Sequence[Cut]) -> TrainResult:
        values = self.critic.values(batch, [plan(batch, cut) for cut in critics])
        self.policy.score(batch, [plan(batch, cut) for cut in cuts])
        found = self.critic.train(self.policy.compute_advantages(values))
        result = self.policy.optimize()
        steps = [{**mine, **theirs} for mine, theirs in zip(result.steps, found.steps, strict=True)]
        return replace(result, steps=steps, seconds={**result.seconds, **found.seconds})

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        self.critic.save(folder)

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        self.critic.load(folder)


def numbers(result: TrainResult) -> dict[str, float]:
    steps = {f"{i} {name}": value for i, step in enumerate(result.steps) for name, value in step.items()}
    return steps | result.metrics


@pytest.mark.slow
def test_results_equal_those_of_a_critic_on_the_policys_ranks(model_path: str, cache: Path) -> None:
    other = tiny_model(cache, seed=1)
    together = FsdpBackend(spec_of(model_path, own=None, reference=other), rank=0, world_size=1)
    separate = SeparateBackends(spec_of(model_path, own=DEDICATED, reference=other))
    assert separate.policy.critic is None
    for batch in BATCHES:
        expected = together.train(batch, [plan(batch, cut) for cut in TWO_STEPS])
        found = separate.train(batch, TWO_STEPS, critics=OTHER_CUT)
        assert expected.metrics["rollout/return"] != 0.0
        assert numbers(found) == pytest.approx(numbers(expected), rel=1e-6, abs=1e-6)
        assert found.seconds.keys() == expected.seconds.keys()


def test_the_policy_is_unchanged_while_only_the_critic_trains(model_path: str) -> None:
    separate = SeparateBackends(spec_of(model_path, own=DEDICATED, num_only_rollouts=1, num_only_steps=2))
    first, second = (separate.train(batch, TWO_STEPS, critics=TWO_STEPS) for batch in BATCHES[:2])
    assert all("critic_loss" in step and "loss" not in step for step in first.steps)
    assert all("critic_loss" in step and "loss" in step for step in second.steps)
    assert (separate.policy.policy.num_steps, separate.critic.critic.num_steps) == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_a_checkpoint_resumes_exactly_on_dedicated_or_shared_ranks(
    model_path: str, tmp_path: Path, moves: bool
) -> None:
    made = spec_of(model_path, own=DEDICATED)
    if moves:
        made = replace(made, offload=OffloadSpec(mode=OffloadMode.move))
    # Loaded by a separate and by a shared critic, with and without offloading.
    first, second = SeparateBackends(made), SeparateBackends(spec_of(model_path, own=DEDICATED))
    first.train(BATCHES[0], TWO_STEPS, critics=TWO_STEPS)
    first.save(tmp_path)
    second.load(tmp_path)
    together = FsdpBackend(spec_of(model_path, own=None), rank=0, world_size=1)
    together.load(tmp_path)
    expected = first.train(BATCHES[1], TWO_STEPS, critics=TWO_STEPS)
    assert numbers(second.train(BATCHES[1], TWO_STEPS, critics=TWO_STEPS)) == numbers(expected)
    assert numbers(together.train(BATCHES[1], [plan(BATCHES[1], cut) for cut in TWO_STEPS])) == numbers(expected)


def test_a_failure_names_the_critics_rank(model_path: str) -> None:
    separate = SeparateBackends(spec_of(model_path, own=DEDICATED))
    separate.critic.values(BATCHES[0], [plan(BATCHES[0], cut) for cut in TWO_STEPS])
    with pytest.raises(WorkerError, match="critic rank 0: the loss of optimiser step 0 must be finite"):
        separate.critic.train(np.full(len(BATCHES[0].tokens), np.nan, dtype=np.float32))


@pytest.mark.parametrize(
    ("algo", "passes"), [({"use_kl_loss": True}, set()), ({"kl_coef": 0.2}, {"old_logprobs", "ref_logprobs"})]
)
@pytest.mark.slow
def test_only_passes_that_the_returns_need_run_while_only_the_critic_trains(
    model_path: str, algo: dict[str, Any], passes: set[str]
) -> None:
    made = spec(
        model_path,
        algo={"advantage_estimator": "ppo", "kl_loss_type": "k2", **algo},
        ref_path=model_path,
        critic=CriticSpec(source=ModelSource(path=model_path), lr=1e-3, num_only_rollouts=1, num_only_steps=2),
        total_steps=2,
    )
    trainer = FsdpBackend(made, rank=0, world_size=1)
    before = {name: weight.clone() for name, weight in trainer.weights()}
    result = trainer.train(BATCHES[0], [plan(BATCHES[0], cut) for cut in TWO_STEPS])
    assert set(result.seconds) == {"values", "optimize_critic", *passes}
    assert all(np.array_equal(weight, before[name]) for name, weight in trainer.weights())
