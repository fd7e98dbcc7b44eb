"""The loss of the trainer, for every algorithm and correction: independent of micro-batches and of masked tokens."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.algo.reduce import tokens_per_trajectory
from rlscale.config import AlgoConfig, MisConfig
from rlscale.training.loss.rollout_advantages import RolloutInputs, compute_rollout_advantages
from rlscale.training.loss.token_loss import StepReduction, TokenInputs, compute_custom_weights, compute_token_losses
from rlscale.types import StepPlan, StepSamples
from tests.unit.training.user_functions import ALL as USER_FUNCTIONS
from tests.unit.training.user_functions import HERE

MIS = {"use_tis": True, "tis_type": "mis", "tis_clip": 1.5}
WHITE = {"normalize_advantages": True, "kl_coef": 0.1, "kl_loss_type": "k3", "gamma": 0.9}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.1, "kl_loss_type": "k2"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", **WHITE},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", **WHITE},
    "ppo": {"advantage_estimator": "ppo", "lambd": 0.8, **WHITE},
    "vapo": {"advantage_estimator": "ppo", "lambd_alpha": 0.6, "lambd_critic": 1.0, **WHITE},
    "gpg": {"advantage_estimator": "gpg"},
    "gdpo": {"advantage_estimator": "gdpo", "overlong_buffer_len": 3},
    "sapo": {"policy_loss": "sapo", "sapo_temperature_neg": 2.0},
    "batch scale": {"scale_rewards": "batch"},
    "reinforce": {"policy_loss": "reinforce", "use_tis": True},
    "distillation": {"opd_kl_coef": 0.3},
    "dapo": {"eps_clip_high": 0.28, "calculate_per_token_loss": True, "overlong_buffer_len": 3},
    "dr_grpo": {"grpo_std_normalization": False, "divide_by_max_response_len": True},
    "sft": {"loss_type": "sft_loss"},
    "dual clip": {"eps_clip_c": 3.0, "rewards_normalization": False, "baseline": 0.5},
    "kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "kl loss k2": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    "entropy": {"entropy_coef": 0.1},
    "tis": {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5},
    "icepop": {"use_tis": True, "tis_type": "icepop", "tis_clip": 1.5, "tis_clip_low": 0.5},
    "mis sequence": {**MIS, "mis": MisConfig(level="sequence", mode="clip")},  # type: ignore[arg-type]
    "mis geometric": {**MIS, "mis": MisConfig(level="geometric", mode="mask", veto=0.05)},  # type: ignore[arg-type]
    "mis token": {**MIS, "mis": MisConfig(reject_level="sequence", reject_high=8.0)},  # type: ignore[arg-type]
    "decoupled": {"decoupled_loss": True},
    "opsm": {"opsm_delta": 0.05},
    "user functions": USER_FUNCTIONS,
    "user loss": {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}:loss", "entropy_coef": 0.1},
}
MAX_RESPONSE_LEN = 6


@dataclass
class Rollout:
    """A random rollout, in float64."""

    lengths: list[int]  # [S]
    mask: Tensor  # [T]
    columns: dict[str, Tensor]  # [T] each
    rewards: Tensor  # [S]
    group_ids: Tensor  # [S]
    trajectory_ids: Tensor  # [S] samples of one trajectory have its reward and group
    added: list[int] | None = None  # [S] tokens that a sample adds to its trajectory; None: `lengths`

    @property
    def layout(self) -> TokenLayout:
        return TokenLayout.from_lengths(self.mask, lengths_S=torch.tensor(self.lengths))

    def rows(self, samples: list[int]) -> Tensor:
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in samples] or [torch.zeros(0).long()])


def make_rollout(lengths: list[int], *, seed: int, trainable: float, moved: float = 0.4) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def noise(size: float) -> Tensor:
        return size * torch.randn(total, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(total, generator=generator, dtype=torch.float64)
    step = noise(1.0).tanh()
    trajectory_ids = torch.randint(0, len(lengths), (len(lengths),), generator=generator)
    return Rollout(
        lengths=lengths,
        mask=torch.rand(total, generator=generator) < trainable,
        columns={
            "lp": old + moved * step,
            "old_logprobs": old,
            "rollout_logprobs": old + noise(0.5),
            "ref_logprobs": old + noise(0.5),
        }
        | {"entropy": noise(1.0).abs(), "values": noise(1.0), "teacher": old + noise(0.5)},
        rewards=torch.rand(len(lengths), generator=generator, dtype=torch.float64)[trajectory_ids],
        group_ids=torch.randint(0, 3, (len(lengths),), generator=generator)[trajectory_ids],
        trajectory_ids=trajectory_ids,
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    # Includes empty responses, groups of one and rollouts without a trainable token.
    lengths = draw(st.lists(st.integers(0, MAX_RESPONSE_LEN), min_size=1, max_size=8))
    trainable = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    made = make_rollout(lengths, seed=draw(st.integers(0, 2**31)), trainable=trainable)
    if draw(st.booleans()):
        made.rewards = torch.full_like(made.rewards, 0.1)
    return made


def advantages(algo: AlgoConfig, rollout: Rollout) -> Tensor:
    inputs = RolloutInputs(
        rewards_S=rollout.rewards,
        group_ids_S=rollout.group_ids,
        trajectory_ids_S=rollout.trajectory_ids,
        named_rewards_SK=torch.stack([rollout.rewards, rollout.rewards.square()], dim=1),
        reward_weights_K=torch.tensor([1.0, 0.3]),
        response_lens_S=torch.tensor(rollout.lengths if rollout.added is None else rollout.added),
        max_response_len=MAX_RESPONSE_LEN,
        layout=rollout.layout,
        rollout_logprobs_T=rollout.columns["rollout_logprobs"],
        old_logprobs_T=rollout.columns["old_logprobs"],
        ref_logprobs_T=rollout.columns["ref_logprobs"],
        teacher_logprobs_T=rollout.columns["teacher"],
        values_T=rollout.columns["values"],
    )
    return compute_rollout_advantages(algo, inputs, custom={"scale": 0.5})


def share_of(
    name: str, rollout: Rollout, part: list[int], *, lp: Tensor, entropy: Tensor, advantages_T: Tensor
) -> tuple[Tensor, Sums]:
    """Share of the loss of the step of a micro-batch of the samples in `part`, and its metrics.

    `lp`, `entropy` and `advantages_T` are of all tokens of the rollout.
    """
    algo = AlgoConfig(**ALGORITHMS[name])
    counts = rollout.layout.counts_per_sample()
    denominators = tokens_per_trajectory(counts, trajectory_ids_S=rollout.trajectory_ids)
    num_trajectories = len(rollout.trajectory_ids[counts > 0].unique())
    plan = StepPlan(microbatches=((),), num_trajectories=num_trajectories, num_tokens=int(counts.sum()))
    rows, columns = rollout.rows(part), rollout.columns | {"advantages": advantages_T}
    layout = TokenLayout.from_lengths(
        rollout.mask[rows], lengths_S=torch.tensor([rollout.lengths[i] for i in part], dtype=torch.int64)
    )
    inputs = TokenInputs(
        **{key: columns[key][rows] for key in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")}
    )
    losses, sums = compute_token_losses(
        algo, logprobs=lp[rows], entropy=entropy[rows], inputs=inputs, layout=layout, custom={"scale": 0.5}
    )
    weights = None
    if algo.custom_reducer_function_path is not None:
        weights = compute_custom_weights(
            algo.custom_reducer_function_path,
            StepSamples(
                num_trainable=counts,
                trajectory_ids=rollout.trajectory_ids,
                group_ids=rollout.group_ids,
                rewards=rollout.rewards,
                max_response_len=MAX_RESPONSE_LEN,
            ),
        )
    reduction = StepReduction(
        algo=algo, plan=plan, denominators_S=denominators, weights_S=weights, max_response_len=MAX_RESPONSE_LEN
    )
    return reduction.reduce(losses, layout=layout, samples=torch.tensor(part, dtype=torch.int64)), sums


def loss_and_gradient(name: str, rollout: Rollout, *, parts: list[list[int]]) -> tuple[Tensor, Tensor, Sums]:
    """Loss, gradient and metrics of one step, in micro-batches of the samples in `parts`."""
    advantages_T = advantages(AlgoConfig(**ALGORITHMS[name]), rollout)
    lp = rollout.columns["lp"].clone().requires_grad_()
    entropy = rollout.columns["entropy"].clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), Sums()
    for part in parts:
        share, part_sums = share_of(name, rollout, part, lp=lp, entropy=entropy, advantages_T=advantages_T)
        share.backward()
        total = total + share.detach()
        for key, (part_sum, part_count) in part_sums.items():
            before = sums.get(key, (torch.zeros(()), torch.zeros(())))
            sums[key] = (before[0] + part_sum, before[1] + part_count)
    gradient = torch.zeros_like(lp) if lp.grad is None else lp.grad
    return total, gradient + (torch.zeros_like(lp) if entropy.grad is None else entropy.grad), sums


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=10, deadline=None)
@given(rollout=rollouts(), data=st.data())
def test_ranks_and_micro_batches_in_any_order_do_not_change_the_loss(
    name: str, rollout: Rollout, data: st.DataObject
) -> None:
    # Shares add up over micro-batches and ranks, so a partition in any order is equivalent to a split over ranks.
    # Some parts are empty: a rank without samples.
    samples = list(range(len(rollout.lengths)))
    order = data.draw(st.permutations(samples))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=5)))
    parts = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(samples)], strict=True)]
    whole, whole_gradient, whole_sums = loss_and_gradient(name, rollout, parts=[samples])
    cut, cut_gradient, cut_sums = loss_and_gradient(name, rollout, parts=parts)
    assert torch.isfinite(whole) and torch.isfinite(whole_gradient).all()
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-9, atol=1e-11)
    assert {k: tuple(map(float, v)) for k, v in cut_sums.items()} == {
        k: pytest.approx(tuple(map(float, v)), abs=1e-9) for k, v in whole_sums.items()
    }


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("parts", [[[3], [1], [0], [2]], [[2, 0], [], [1, 3]]])
def test_micro_batches_do_not_change_a_loss_above_0(name: str, parts: list[list[int]]) -> None:
    # Random rollouts often have a loss of 0, which any error in the partition keeps.
    rollout = make_rollout([4, 2, 3, 5], seed=0, trainable=0.9)
    # The last two samples are one trajectory.
    rollout.trajectory_ids, rollout.group_ids = torch.tensor([5, 1, 4, 4]), torch.tensor([0, 1, 0, 0])
    rollout.rewards = rollout.rewards[torch.tensor([0, 1, 2, 2])]
    whole, whole_gradient, _ = loss_and_gradient(name, rollout, parts=[[0, 1, 2, 3]])
    cut, cut_gradient, _ = loss_and_gradient(name, rollout, parts=parts)
    assert whole.abs() > 1e-4 and whole_gradient.norm() > 1e-4
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=10, deadline=None)
@given(rollout=rollouts(), garbage=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30]))
def test_masked_tokens_have_no_effect(name: str, rollout: Rollout, garbage: float) -> None:
    parts = [list(range(len(rollout.lengths)))]
    clean, clean_gradient, clean_sums = loss_and_gradient(name, rollout, parts=parts)
    dirty_columns = {key: torch.where(rollout.mask, column, garbage) for key, column in rollout.columns.items()}
    dirty, dirty_gradient, dirty_sums = loss_and_gradient(name, replace(rollout, columns=dirty_columns), parts=parts)
    assert torch.equal(clean, dirty) and torch.equal(clean_gradient, dirty_gradient)
    assert (dirty_gradient[~rollout.mask] == 0).all()
    assert all(torch.equal(clean_sums[key][0], dirty_sums[key][0]) for key in clean_sums)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=10, deadline=None)
@given(rollout=rollouts(), data=st.data())
def test_the_order_of_trajectories_does_not_change_advantages(name: str, rollout: Rollout, data: st.DataObject) -> None:
    algo = AlgoConfig(**ALGORITHMS[name])
    # Within a trajectory the order of the samples is that of time: the stable sort keeps it.
    places = data.draw(st.permutations(range(len(rollout.lengths))))
    order = sorted(range(len(rollout.lengths)), key=lambda i: places[int(rollout.trajectory_ids[i])])
    rows = rollout.rows(order)
    moved = Rollout(
        lengths=[rollout.lengths[i] for i in order],
        mask=rollout.mask[rows],
        columns={key: column[rows] for key, column in rollout.columns.items()},
        rewards=rollout.rewards[order],
        group_ids=rollout.group_ids[order],
        trajectory_ids=rollout.trajectory_ids[order],
    )
    torch.testing.assert_close(advantages(algo, moved), advantages(algo, rollout)[rows], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "cispo"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_equals_finite_differences(name: str, seed: int) -> None:
    # The ratios avoid the kinks of max and clip. CISPO's weight is detached by definition, so it is excluded.
    rollout = make_rollout([4, 0, 3, 5], seed=seed, trainable=0.8, moved=0.1)
    parts = [[0, 1], [2, 3]]
    _, gradient, _ = loss_and_gradient(name, replace(rollout), parts=parts)
    constant = advantages(AlgoConfig(**ALGORITHMS[name]), rollout)  # no function of the current logprobs

    def loss(moved: Tensor) -> Tensor:
        lp, entropy = rollout.columns["lp"] + moved, rollout.columns["entropy"] + moved
        with torch.no_grad():
            shares = [share_of(name, rollout, part, lp=lp, entropy=entropy, advantages_T=constant) for part in parts]
        return shares[0][0] + shares[1][0]

    step = 1e-6
    for token, move in enumerate(step * torch.eye(len(rollout.mask), dtype=torch.float64)):
        difference = (loss(move) - loss(-move)) / (2 * step)
        torch.testing.assert_close(difference, gradient[token], rtol=1e-6, atol=1e-8)


def test_equal_rewards_give_no_gradient() -> None:
    rollout = make_rollout([4, 2, 3, 5], seed=0, trainable=1.0)
    rollout.rewards = torch.full_like(rollout.rewards, 0.1)
    for name in ("grpo", "gspo", "cispo", "rloo", "dr_grpo", "gpg", "batch scale", "gdpo"):
        algo = AlgoConfig(**{**ALGORITHMS[name], "kl_coef": 0.0, "overlong_buffer_len": None})
        assert advantages(algo, rollout).tolist() == [0.0] * 14, name
