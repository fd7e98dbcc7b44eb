"""Training on trees: shared prefixes are computed once, with the loss and gradient of separate samples."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.training.attention.packed import PackedLayout
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.step import compute_policy_terms
from rlscale.training.packing.microbatch import lay_out_samples, pack
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import plan, spec, tiny_model, with_branches

CPU = torch.device("cpu")
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
# Random old logprobs, so that ratios differ from 1 and some are clipped.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"use_rollout_logprobs": True, "eps_clip": 0.2},
    "gspo": {"use_rollout_logprobs": True, "advantage_estimator": "gspo", "eps_clip": 0.3},
    "ppo": {"use_rollout_logprobs": True, "advantage_estimator": "ppo", "lambd": 0.9, "kl_coef": 0.1},
    "kl and entropy": {**KL, "use_tis": True, "calculate_per_token_loss": True},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9},
    "sft": {"loss_type": "sft_loss"},
}


@given(seed=st.integers(0, 10**6), size=st.integers(1, 9), data=st.data())
@pytest.mark.slow
def test_a_tree_keeps_every_token_of_every_sample(seed: int, size: int, data: st.DataObject) -> None:
    batch = with_branches(seed, group_size=size)
    chosen = data.draw(st.lists(st.integers(0, batch.num_samples - 1), min_size=1, unique=True))
    rows, micro = (
        lay_out_samples(batch, chosen, share_prompts=True),
        pack(batch, chosen, device=CPU, share_prompts=True),
    )
    apart = pack(batch, chosen, device=CPU)
    for name in ("batch_rows", "sample_indices"):
        assert getattr(micro, name).tolist() == getattr(apart, name).tolist()
    assert micro.layout.sample_ids_T.tolist() == apart.layout.sample_ids_T.tolist()
    assert micro.gather_shards(micro.targets).tolist() == apart.targets.tolist()
    if rows.tree is None:
        assert micro.input_ids.tolist() == apart.input_ids.tolist()
        return
    assert isinstance(micro.packing, PackedLayout) and micro.packing.shared is not None
    expand = micro.packing.shared.expand
    assert micro.input_ids[0, expand].tolist() == apart.input_ids[0].tolist()
    assert micro.position_ids[0, expand].tolist() == apart.position_ids[0].tolist()
    # A row is before another one on a path if the segments say so.
    lasts, ends = np.repeat(rows.tree.lasts, rows.tree.ends - rows.tree.starts), np.cumsum(rows.lengths)
    for start, end in zip(ends - rows.lengths, ends, strict=True):
        path = expand[start:end].numpy()
        assert np.flatnonzero((np.arange(len(lasts)) <= path[-1]) & (path[-1] < lasts)).tolist() == path.tolist()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    yield
    leave_world()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=LOSSES)
def trainers(request: pytest.FixtureRequest, world: None, model_path: str) -> list[FsdpBackend]:
    """Two trainers of the same weights, which share prefixes and do not."""
    algo = LOSSES[request.param]
    critic = CriticSpec(source=ModelSource(path=model_path), lr=0.0) if "ppo" in algo.values() else None
    changes = {"lr": 0.0, "clip_grad": 0.0, "adam_beta1": 0.0, "ref_path": model_path, "critic": critic}
    return [
        FsdpBackend(spec(model_path, algo=algo, share_prompts=shares, **changes), rank=0, world_size=1)
        for shares in (True, False)
    ]


def train(trainer: FsdpBackend, batch: TrainBatch, cut: list[list[int]]) -> tuple[dict[str, float], Tensor]:
    result = trainer.train(batch, [plan(batch, [cut])])
    # With beta1 = 0 Adam's first moment is the gradient of the step.
    state = trainer.policy.optimizer.state
    gradient = torch.cat([state[each]["exp_avg"].flatten() for each in trainer.policy.model.parameters()])
    return result.steps[0] | result.metrics, gradient


@pytest.mark.slow
@FEW
@given(seed=st.integers(0, 10**6), data=st.data())
def test_loss_and_gradient_are_those_of_separate_samples(
    trainers: list[FsdpBackend], seed: int, data: st.DataObject
) -> None:
    batch = with_branches(seed)
    order = data.draw(st.permutations(range(batch.num_samples)))
    bounds = sorted(data.draw(st.lists(st.integers(0, batch.num_samples), max_size=2)))
    cut = [list(order[a:b]) for a, b in zip([0, *bounds], [*bounds, len(order)], strict=True)]
    (metrics, gradient), (expected, exact) = (
        train(trainer, batch, each) for trainer, each in zip(trainers, (cut, [sorted(order)]), strict=True)
    )
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # Equal to 1e-6, or to 1e-7 where the gradient vanishes, as that of advantages near 0 does.
    assert (gradient - exact).norm() <= 1e-6 * max(float(exact.norm()), 0.1)


def test_fewer_activations_are_kept(world: None, model_path: str) -> None:
    """8 samples with 75 % in common: at least 2.5 times less is saved for the backward pass."""
    sizes = []
    for shares in (True, False):
        trainer = FsdpBackend(spec(model_path, share_prompts=shares), rank=0, world_size=1)
        batch = common_prefix()
        micro, saved = trainer.rank.pack(batch, range(8)), dict[int, int]()
        weights = {each.untyped_storage().data_ptr() for each in trainer.policy.model.parameters()}

        def keep(tensor: Tensor, saved: dict[int, int] = saved, weights: set[int] = weights) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            terms = compute_policy_terms(trainer.policy.model, micro, temperature=1.0, entropy_grad=False)
        assert torch.isfinite(terms[0]).all()
        sizes.append(sum(saved.values()))
    assert sizes[1] >= 2.5 * sizes[0]


def common_prefix() -> TrainBatch:
    """8 samples of 256 tokens that have the first 192 in common; the common part is trained in the first one."""
    batch = with_branches(0, num_groups=1, group_size=8)
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 14, (8, 256)).astype(np.int32), np.ones((8, 256), dtype=np.uint8)
    tokens[:, :192] = tokens[0, :192]
    mask[:, :32], mask[1:, :192] = 0, 0
    zeros = np.zeros(8 * 256, dtype=np.float32)
    return replace(
        batch,
        tokens=tokens.flatten(),
        loss_mask=mask.flatten(),
        rollout_logprobs=zeros,
        weight_versions=zeros.astype(np.int32),
        offsets=np.arange(9, dtype=np.int64) * 256,
        prompt_lens=np.full(8, 32, dtype=np.int32),
    )
