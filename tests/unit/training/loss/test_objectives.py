"""Effect of the keys of `algo` that choose estimator, scale and policy loss, from a `TrainBatch` on."""

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS
from rlscale.algo.losses import POLICY_LOSSES
from rlscale.algo.ragged import TokenLayout
from rlscale.config import AdvantageEstimator, AlgoConfig, PolicyLossName, policy_loss_of
from rlscale.data.batch import build_batch
from rlscale.rewards.reward_value import select_value
from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.loss.token_loss import TokenInputs, compute_token_losses
from rlscale.training.metrics import MetricSums
from rlscale.training.prepare import compute_advantages
from rlscale.training.rollout_state import PackedRollout, TrainColumns
from rlscale.types import Float32, Group, Prompt, Sample, SampleStatus, TrainBatch
from tests.unit.training.rollouts import make_batch, spec

CPU = torch.device("cpu")
BATCH = replace(
    make_batch([(2, 3), (2, 1), (3, 2), (1, 4)], group_size=2), rewards=np.array([1, 0, 0.5, 0.25], np.float32)
)


def test_the_config_knows_every_estimator_and_loss() -> None:
    assert [name.value for name in AdvantageEstimator] == sorted(ESTIMATORS, key=list(AdvantageEstimator).index)  # type: ignore[arg-type]
    assert {name.value for name in PolicyLossName} == set(POLICY_LOSSES)
    for name, estimator in ESTIMATORS.items():
        assert policy_loss_of(AlgoConfig(advantage_estimator=AdvantageEstimator(name))) == estimator.policy_loss


def losses(**algo: Any) -> Tensor:
    """Losses of two tokens of ratio e, with advantages 1 and -1, in responses of one token and of ratio 1."""
    layout = TokenLayout.from_lengths(torch.ones(4, dtype=torch.bool), lengths_S=torch.tensor([2, 2]))
    inputs = TokenInputs(
        old_logprobs=torch.tensor([-2.0, -2.0, -2.0, -2.0]),
        rollout_logprobs=torch.tensor([-2.0, -3.0, -2.0, -2.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
    )
    logprobs = torch.tensor([-1.0, -2.0, -1.0, -2.0])
    return compute_token_losses(AlgoConfig(**algo), logprobs=logprobs, entropy=None, inputs=inputs, layout=layout)[0]


E = exp(1)


def gate(tau: float) -> float:
    return 4 / tau / (1 + exp(-tau * (E - 1)))


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ({}, [-1.2, -1.0, E, 1.0]),
        ({"policy_loss": "gspo"}, [-1.2, -1.2, exp(0.5), exp(0.5)]),
        ({"policy_loss": "cispo"}, [1.2, 2.0, -1.2, -2.0]),
        ({"policy_loss": "sapo"}, [-gate(1.0), -2.0, gate(1.05), 2 / 1.05]),
        (
            {"policy_loss": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
            [-gate(2.0), -1.0, gate(0.5), 4.0],
        ),
        ({"policy_loss": "reinforce"}, [1.0, 2.0, -1.0, -2.0]),
        # The importance weight of the second token is e, bounded by algo.tis_clip.
        ({"policy_loss": "reinforce", "use_tis": True}, [1.0, 4.0, -1.0, -2.0]),
        ({"advantage_estimator": "gpg"}, [1.0, 2.0, -1.0, -2.0]),
        ({"advantage_estimator": "gspo", "policy_loss": "clip"}, [-1.2, -1.0, E, 1.0]),
    ],
)
def test_the_policy_loss_is_the_chosen_one(algo: dict[str, Any], expected: list[float]) -> None:
    torch.testing.assert_close(losses(**algo), torch.tensor(expected))


def gradient(**algo: Any) -> Tensor:
    """Gradient of the loss in the first step of a rollout, whose old logprobs are the policy's."""
    layout = TokenLayout.from_lengths(torch.ones(4, dtype=torch.bool), lengths_S=torch.tensor([2, 2]))
    inputs = TokenInputs(advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    logprobs = torch.tensor([-1.0, -2.0, -1.0, -2.0], requires_grad=True)
    compute_token_losses(AlgoConfig(**algo), logprobs=logprobs, entropy=None, inputs=inputs, layout=layout)[
        0
    ].sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_in_the_first_step_no_clip_range_has_an_effect(loss: str) -> None:
    # The warnings "algo.eps_clip is ignored" and "gspo trains as grpo does" rest on this.
    narrow = gradient(policy_loss=loss, eps_clip=1e-6, eps_clip_high=1e-6, eps_clip_c=1.001)
    torch.testing.assert_close(narrow, gradient(), rtol=0, atol=0)


def advantages(batch: TrainBatch, *, values: list[float] | None = None, **algo: Any) -> TrainColumns:
    """Advantages of a batch, at its trainable tokens."""
    rollout = PackedRollout(
        batch=batch, steps=[], micros=[], metrics=MetricSums(CPU), logprob_collector=LogprobCollector(batch)
    )
    columns = TrainColumns(
        rollout_logprobs=torch.tensor(batch.rollout_logprobs),
        values=None if values is None else torch.tensor(values),
    )
    return compute_advantages(rollout, columns, spec("model", algo=algo), device=CPU)


def by_sample(batch: TrainBatch, **algo: Any) -> list[float]:
    column = advantages(batch, **algo).advantages
    assert column is not None
    return [float(column[stop - 1]) for stop in batch.offsets[1:]]


def test_the_scale_of_rewards() -> None:
    # Centred by group: +-0.5 and +-0.125; deviations 0.7071 and 0.1768 of the groups, 0.4270 of the batch.
    half = 0.5**0.5
    assert by_sample(BATCH) == pytest.approx([half, -half, half, -half], rel=1e-4)
    spread = float(np.std(BATCH.rewards, ddof=1))
    expected = [x / spread for x in (0.5, -0.5, 0.125, -0.125)]
    assert by_sample(BATCH, scale_rewards="batch") == pytest.approx(expected, rel=1e-4)
    centred = [0.5, -0.5, 0.125, -0.125]
    assert by_sample(BATCH, scale_rewards="batch", grpo_std_normalization=False) == pytest.approx(centred)


def named(rewards: list[list[float]], weights: tuple[float, ...] = ()) -> TrainBatch:
    column: Float32 = np.array(rewards, dtype=np.float32)
    return replace(BATCH, named_rewards=column, reward_names=("answer", "format"), reward_weights=weights)


def test_named_rewards_reach_gdpo_with_their_weights() -> None:
    # The second kind alone separates the second group.
    batch = named([[1, 5], [0, 5], [0, 0], [0, 50]], weights=(1.0, 0.5))
    sums = torch.tensor([0.5**0.5, -(0.5**0.5), -0.5 * 0.5**0.5, 0.5 * 0.5**0.5])
    expected = (sums / sums.std()).tolist()
    assert by_sample(batch, advantage_estimator="gdpo") == pytest.approx(expected, rel=1e-4)
    # Other estimators read the one reward.
    assert by_sample(batch) == by_sample(BATCH)


def test_rewards_of_samples_by_name_reach_gdpo() -> None:
    weights = {"right": 1.0, "length": 0.5}
    prompt = Prompt(index=0, text="", token_ids=(1,))
    samples = [Sample(index=i, group_index=0, prompt=prompt, seed=0, status=SampleStatus.completed) for i in range(3)]
    for sample, right, length in zip(samples, (1, 0, 0), (0, 0, 3), strict=True):
        sample.append([5], logprobs=[0.0], weight_versions=[0])
        sample.reward = select_value({"length": length, "right": right}, None, sample, weights=weights)
    batch = build_batch([Group(index=0, prompt=prompt, samples=samples)], version=0)
    assert batch.rewards.tolist() == [1.0, 0.0, 1.5]
    # Each has deviation 3^-0.5: (1.155, -0.577, -0.577) and (-0.577, -0.577, 1.155). Their sum with weights 1 and 0.5
    # is (0.866, -0.866, 0), whose deviation is 0.866.
    assert by_sample(batch, advantage_estimator="gdpo") == pytest.approx([1, -1, 0], abs=1e-4)


def test_without_named_rewards_gdpo_normalises_the_one_reward_twice() -> None:
    half = 0.5**0.5
    expected = [x / float(np.std([half, -half, half, -half], ddof=1)) for x in (half, -half, half, -half)]
    assert by_sample(BATCH, advantage_estimator="gdpo") == pytest.approx(expected, rel=1e-4)


def test_the_penalty_of_long_responses_is_one_more_reward_of_gdpo() -> None:
    # All named rewards are equal: only the length of 70 tokens, of which 69 are more than 70 - 2, separates group 0.
    long = make_batch([(2, 69), (2, 1), (3, 2), (1, 4)], group_size=2)
    long = replace(long, named_rewards=np.ones((4, 2), np.float32), reward_weights=(0.1, 0.1))
    found = by_sample(long, advantage_estimator="gdpo", overlong_buffer_len=2)
    assert found[0] < -0.8 and found[1] > 0.8 and found[2:] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert by_sample(long, advantage_estimator="gdpo") == [0.0] * 4


def test_a_part_without_trainable_tokens_adds_nothing_to_the_length_of_its_trajectory() -> None:
    # Two trajectories of 30 tokens; the second part of one of them repeats its 30 tokens, masked, and adds none.
    batch = make_batch([(2, 30), (2, 30), (2, 35)], group_size=3)
    batch = replace(batch, rewards=np.ones(3, np.float32), trajectory_ids=np.array([0, 1, 1]))
    batch.loss_mask[batch.offsets[2] :] = 0
    assert by_sample(batch, overlong_buffer_len=64)[:2] == [0.0, 0.0]
    # Of a trajectory that is masked as a whole, each part counts.
    batch = replace(batch, loss_mask=np.where(np.arange(len(batch.tokens)) < batch.offsets[1], batch.loss_mask, 0))
    assert by_sample(batch, overlong_buffer_len=64)[0] > 0.7


def test_named_rewards_of_one_trajectory_must_be_equal() -> None:
    batch = replace(named([[1, 0], [0, 0], [1, 1], [1, 0]]), trajectory_ids=np.array([0, 1, 2, 2]))
    batch = replace(batch, rewards=np.array([1, 0, 1, 1], np.float32))
    with pytest.raises(AssertionError, match="named_rewards_SK of samples of one trajectory must be equal"):
        advantages(batch, advantage_estimator="gdpo")


def test_gdpo_counts_a_trajectory_of_two_samples_once() -> None:
    whole = named([[1, 0], [0, 0], [1, 1], [0, 0]])
    batch = replace(
        named([[1, 0], [0, 0], [1, 1], [1, 1]]),
        group_ids=np.array([0, 0, 1, 1]),
        trajectory_ids=np.array([0, 1, 2, 2]),
        rewards=np.array([1, 0, 1, 1], np.float32),
    )
    # Its group has one trajectory, which has no baseline.
    assert by_sample(whole, advantage_estimator="gdpo")[2] > 0.5
    assert by_sample(batch, advantage_estimator="gdpo")[2:] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_lambdas_of_advantages_and_returns() -> None:
    values = [0.3] * int(BATCH.offsets[-1])
    ppo = {"advantage_estimator": "ppo", "values": values}
    both = advantages(BATCH, lambd=0.5, **ppo)
    critic = advantages(BATCH, lambd=0.5, lambd_critic=1.0, **ppo)
    alpha = advantages(BATCH, lambd=0.5, lambd_alpha=0.5, **ppo)
    tables = [(each.advantages, each.returns) for each in (both, critic, alpha)]
    (a, r), (critic_a, critic_r), (alpha_a, alpha_r) = tables
    assert a is not None and critic_a is not None and critic_r is not None and r is not None
    assert alpha_a is not None and alpha_r is not None
    assert torch.equal(critic_a, a) and not torch.equal(critic_r, r)
    assert torch.equal(alpha_r, r) and not torch.equal(alpha_a, a)
    # With lambda 1 and gamma 1 every return is the reward of the sample.
    assert [float(critic_r[stop - 1]) for stop in BATCH.offsets[1:]] == pytest.approx(BATCH.rewards.tolist())
    assert float(critic_r[BATCH.prompt_lens[0]]) == pytest.approx(1.0)
