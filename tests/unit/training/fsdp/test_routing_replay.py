"""Routing replay with transformers: tokens use recorded experts, and routers are trained as without it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlscale.config import QkvFormat
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.expert_routes import RouteIds
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.routing_replay import FsdpRouterHook
from rlscale.training.fsdp.step import score_logprobs
from rlscale.training.modules.expert_routing import RouterHook, RoutingReplay
from rlscale.training.packing.token_rows import TokenRows
from rlscale.training.rollout_state import PackedRollout
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import (
    RAGGED,
    make_batch,
    plan,
    spec,
    tiny_latent,
    tiny_model,
    tiny_moe,
    with_equal_prompts,
)

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
RECORD = {"use_routing_replay": True}
ENGINE = {"use_rollout_routing_replay": True}
CUTS = [[[[0, 1], [2, 3]]], [[[4, 5, 6], [7]]]]
"""Micro-batches of two optimiser steps of one rank; old logprobs are computed in one micro-batch for each step."""


def backend(path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(path, **{"algo": RECORD, "lr": 0.03, **changes}), rank=0, world_size=1)


def plans(batch: TrainBatch, cuts: Any = CUTS) -> list[Any]:
    made = [plan(batch, cut) for cut in cuts]
    return [replace(each, scoring=((tuple(sorted(each.sample_indices)),),)) for each in made]


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def replay_of(trainer: FsdpBackend) -> RoutingReplay:
    replay = trainer.policy._routing_replay
    assert replay is not None
    return replay


class Choices:
    """Experts of each token in the last passes, by router and row of the batch."""

    def __init__(self, trainer: FsdpBackend) -> None:
        self.found: dict[tuple[int, int], list[int]] = {}
        for hook, router in zip(replay_of(trainer).hooks, routers(trainer.policy.model), strict=True):
            router.register_forward_hook(self._adding(hook))

    def take(self) -> dict[tuple[int, int], list[int]]:
        found, self.found = self.found, {}
        return found

    def _adding(self, hook: RouterHook) -> Callable[..., None]:
        def add(router: nn.Module, args: Any, output: Any) -> None:
            assert hook.token_rows is not None
            chosen = output[2].sort(dim=-1).values.tolist()
            for row, place in zip(hook.token_rows.rows.tolist(), hook.token_rows.places.tolist(), strict=True):
                self.found[hook.index, row] = chosen[place]

        return add


def free_logprobs(trainer: FsdpBackend, rollout: PackedRollout) -> Tensor:
    """In the micro-batches of training, by the routers' own choice."""
    again = replace(rollout, scoring=None)
    return score_logprobs(trainer.policy.model, again, temperature=1.0, replay=replay_of(trainer))


def replayed_logprobs(trainer: FsdpBackend, rollout: PackedRollout) -> Tensor:
    with replay_of(trainer).replaying(rollout):
        return free_logprobs(trainer, rollout)


def disturb(model: nn.Module, *, scale: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(model):
            weight = router.get_parameter("weight")
            weight.add_(scale * torch.randn(weight.shape, generator=generator))


def random_routes(batch: TrainBatch, *, num_layers: int = 2, num_experts: int = 4, num_chosen: int = 2) -> RouteIds:
    scores = np.random.default_rng(3).random((len(batch.tokens), num_layers, num_experts))
    return np.argsort(scores, axis=-1)[..., :num_chosen].astype(np.uint8)


def test_replay_uses_the_recorded_experts_in_other_micro_batches(cache: Path) -> None:
    trainer = backend(tiny_moe(cache))
    choices = Choices(trainer)
    rollout, _ = trainer.prepare(BATCH, plans(BATCH))
    recorded = choices.take()
    assert len(recorded) == 2 * len(BATCH.tokens)
    disturb(trainer.policy.model)
    free, own = free_logprobs(trainer, rollout), choices.take()
    replayed, chosen = replayed_logprobs(trainer, rollout), choices.take()
    assert chosen == recorded
    assert sum(own[key] != experts for key, experts in recorded.items()) > 0.1 * len(recorded)
    metrics = replay_of(trainer).collect_metrics()
    assert metrics["routes/replayed"] == 1 and metrics["routes/differing"] > 0.1
    # transformers with the same experts, one sample at a time, computes the same.
    state, given = trainer.policy.model.state_dict(), np.zeros((len(BATCH.tokens), 2, 2), np.uint8)
    for (layer, row), experts in recorded.items():
        given[row, layer] = experts
    expected = reference_logprobs(tiny_moe(cache), state, given)
    torch.testing.assert_close(replayed, expected, atol=2e-6, rtol=1e-5)
    assert float((free - expected).abs().max()) > 1e-4


def reference_logprobs(path: str, state: dict[str, Tensor], routes: RouteIds, batch: TrainBatch = BATCH) -> Tensor:
    """Logprobs of transformers' Qwen3-MoE with given experts; 0 where a token is not trained. [T]"""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    column = torch.zeros(len(batch.tokens))
    for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        hooks = [
            router.register_forward_hook(_choosing(torch.from_numpy(routes[start:stop, layer].astype(np.int64))))
            for layer, router in enumerate(routers(model))
        ]
        ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        for hook in hooks:
            hook.remove()
        column[start + 1 : stop] = logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
    return column * torch.from_numpy(batch.loss_mask)


def _choosing(chosen: Tensor) -> Callable[..., Any]:
    def choose(router: Any, args: Any, output: Any) -> Any:
        shares = output[0].softmax(dim=-1).gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return output[0], shares, chosen

    return choose


def test_replay_keeps_the_bits_of_the_recorded_pass(cache: Path) -> None:
    # The bias of DeepSeek-V3 changes the choice and nothing else.
    trainer = backend(tiny_latent(cache))
    rollout, _ = trainer.prepare(BATCH, [replace(each, scoring=None) for each in plans(BATCH)])
    before = trainer.policy.compute_old_logprobs(rollout, entropies=None)
    for router in routers(trainer.policy.model):
        router.get_buffer("e_score_correction_bias").copy_(torch.linspace(0.3, -0.3, 8))
    assert float((free_logprobs(trainer, rollout) - before).abs().max()) > 1e-4
    assert torch.equal(replayed_logprobs(trainer, rollout), before)
    assert replay_of(trainer).collect_metrics()["routes/differing"] > 0.1


def trained(path: str, batch: TrainBatch = BATCH, **changes: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = backend(path, **changes)
    steps = trainer.train(batch, plans(batch)).steps
    return list(steps), {name: weight.clone() for name, weight in trainer.weights()}


@pytest.mark.slow
def test_recomputed_layers_use_the_same_experts(cache: Path) -> None:
    steps, weights = trained(tiny_moe(cache))
    again, others = trained(tiny_moe(cache), gradient_checkpointing=True)
    assert steps[0]["routes/differing"] == 0 < steps[1]["routes/differing"]
    assert again == steps and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    free, _ = trained(tiny_moe(cache), algo={})
    assert free[1]["grad_norm"] != steps[1]["grad_norm"]


@pytest.mark.parametrize("changes", [{"qkv_format": QkvFormat.bshd}, {"share_prompts": True}])
@pytest.mark.parametrize("algo", [RECORD, ENGINE])
@pytest.mark.slow
def test_padded_rows_and_shared_prompts_train_as_samples_alone(
    cache: Path, algo: dict[str, bool], changes: dict[str, Any]
) -> None:
    batch = with_equal_prompts()
    routes = random_routes(batch)
    for i, first in enumerate((0, 0, 0, 0, 4, 4, 6, 7, 7)):
        start, source, length = int(batch.offsets[i]), int(batch.offsets[first]), int(batch.prompt_lens[i])
        if i != 2:  # another engine had other routes
            routes[start : start + length] = routes[source : source + length]
    batch = replace(batch, routes=routes)
    cuts = [[[[0, 1, 2], [4, 5]]], [[[3, 6], [7, 8]]]]

    def run(**fields: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        trainer = backend(tiny_moe(cache), algo=algo, adam_eps=1e-3, **fields)
        steps = trainer.train(batch, plans(batch, cuts)).steps
        return list(steps), {name: weight.clone() for name, weight in trainer.weights()}

    steps, weights = run(share_prompts=False)
    found, others = run(**changes)
    for one, other in zip(found, steps, strict=True):
        assert one["routes/replayed"] == 1
        assert one == pytest.approx(other, abs=2e-6, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-5, rtol=1e-5)


def test_only_tokens_with_equal_routes_are_computed_once(cache: Path) -> None:
    batch = with_equal_prompts()
    trainer = backend(tiny_moe(cache), algo=ENGINE)
    samples = plans(batch, [[[[7, 8]]]])  # prompts of 90 tokens, responses of 5
    routes = random_routes(batch)
    sizes = []
    for num_equal in (90, 40, 0):
        start, source = int(batch.offsets[8]), int(batch.offsets[7])
        equal = routes.copy()
        equal[start : start + num_equal] = routes[source : source + num_equal]
        rollout = trainer.rank.pack_rollout(replace(batch, routes=equal), samples, with_scoring=False)
        sizes.append(rollout.all_micros[0].input_ids.shape[1])
    # A prefix that is shorter than a prompt is shared from 64 tokens on.
    assert sizes == [100, 190, 190]


def test_the_routes_of_the_engine_are_used_for_old_logprobs_and_steps(cache: Path) -> None:
    routes = random_routes(BATCH)
    routes[: BATCH.offsets[1]] = 255  # no routes
    routes[BATCH.offsets[1] :, :, 1][0] = routes[BATCH.offsets[1], :, 0]  # not distinct
    batch = replace(BATCH, routes=routes)
    trainer = backend(tiny_moe(cache), algo=ENGINE)
    choices = Choices(trainer)
    rollout, columns = trainer.prepare(batch, plans(batch))
    first, found = int(batch.offsets[1]), choices.take()
    known = [(layer, row) for layer, row in found if row > first]
    assert len(known) == 2 * (len(batch.tokens) - first - 1)
    assert all(found[key] == sorted(routes[key[1], key[0]].tolist()) for key in known)
    expected = reference_logprobs(tiny_moe(cache), trainer.policy.model.state_dict(), routes % 4)
    assert columns.old_logprobs is not None
    second = int(batch.offsets[2])
    torch.testing.assert_close(columns.old_logprobs[second:], expected[second:], atol=2e-6, rtol=1e-5)
    # Earlier weights, here equal ones, are scored along the same routes.
    assert torch.equal(trainer.policy.compute_snapshot_logprobs(rollout), columns.old_logprobs)
    assert float((trainer.policy.compute_logprobs(rollout) - columns.old_logprobs).abs().max()) > 1e-3
    steps = trainer.train(batch, plans(batch)).steps
    # All tokens but the last of each sample count: the first sample of the first step, and one token, have no routes.
    lengths = [int(length) - 1 for length in np.diff(batch.offsets)]
    assert steps[0]["routes/replayed"] == pytest.approx(1 - (lengths[0] + 1) / sum(lengths[:4]))
    assert steps[1]["routes/replayed"] == 1 and steps[1]["routes/differing"] > 0.5


def test_routes_of_another_model_are_refused(cache: Path) -> None:
    batch = replace(BATCH, routes=random_routes(BATCH, num_layers=3))
    with pytest.raises(DataError, match=r"routes of a rollout must have shape \[tokens, 2, 2\], got \[\d+, 3, 2\]"):
        backend(tiny_moe(cache), algo=ENGINE).prepare(batch, plans(batch))


def test_models_without_routers_are_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo.use_routing_replay must be false with a qwen3 model, got true"):
        backend(tiny_model(cache))


class Given(RoutingReplay):
    """Replays the same experts for every token."""

    def __init__(self, hook: RouterHook, given: Tensor) -> None:
        super().__init__([hook], device=torch.device("cpu"))
        self._given = given

    def choose(self, hook: RouterHook, own: Tensor) -> Tensor | None:
        assert own.shape == self._given.shape
        return self._given

    def recording(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        return nullcontext()

    def replaying(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        return nullcontext()


def refuse(fix: str) -> ConfigError:
    return ConfigError([Problem(path="algo.use_routing_replay", rule="be false", value="true", fix=fix)])


NUM_EXPERTS, NUM_CHOSEN, SCALE = 8, 3, 2.5
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_experts_per_tok": NUM_CHOSEN,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
}
GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": SCALE}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3MoeTopKRouter": ("qwen3_moe", {"norm_topk_prob": True}),
    "Qwen2MoeTopKRouter": ("qwen2_moe", {"norm_topk_prob": False}),
    "MixtralTopKRouter": ("mixtral", {}),
    "MiniMaxM2TopKRouter": ("minimax_m2", {}),
    "DeepseekV3TopkRouter": ("deepseek_v3", GROUPS),
    "Glm4MoeTopkRouter": ("glm4_moe", GROUPS),
    "Glm4MoeLiteTopkRouter": ("glm4_moe_lite", GROUPS),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_gradients_of_replayed_experts_follow_the_formula_of_the_family(name: str) -> None:
    family, fields = FAMILIES[name]
    config = transformers.AutoConfig.for_model(family, **SIZES, **fields)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    router = getattr(module, name)(config)
    generator = torch.Generator().manual_seed(0)
    x, given = torch.randn(10, 16, generator=generator), torch.rand(10, NUM_EXPERTS, generator=generator).argsort(1)
    given = given[:, :NUM_CHOSEN]
    with torch.no_grad():
        router.weight.copy_(torch.randn(NUM_EXPERTS, 16, generator=generator))
    bias = [torch.linspace(-1, 1, NUM_EXPERTS)] if family == "minimax_m2" else []
    free = router(x, *bias)
    hook = FsdpRouterHook(router, index=0, layer=0, refusal=refuse)
    Given(hook, given)
    logits, weights, chosen = router(x, *bias)
    assert torch.equal(chosen, given) and torch.equal(logits, free[0]) and not torch.equal(free[2], given)
    expected = _formula(family, x @ router.weight.T, given, is_normalized=fields.get("norm_topk_prob", True))
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    factors = torch.randn(weights.shape, generator=generator)
    (found,) = torch.autograd.grad((weights * factors).sum(), router.weight)
    (wanted,) = torch.autograd.grad((expected * factors).sum(), router.weight)
    assert float(wanted.abs().max()) > 0.01
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def _formula(family: str, logits: Tensor, chosen: Tensor, *, is_normalized: bool) -> Tensor:
    """Weights of the experts as the papers and model cards define them. [T, K]"""
    if family in ("qwen3_moe", "qwen2_moe", "mixtral"):
        weights = logits.softmax(dim=-1).gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True) if is_normalized else weights
    weights = logits.sigmoid().gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) * (1 if family == "minimax_m2" else SCALE)


def test_a_router_that_does_not_choose_by_topk_is_refused() -> None:
    class SortingRouter(nn.Module):
        top_k, num_experts = 2, 4

        def forward(self, scores: Tensor) -> Tensor:
            return scores.argsort(dim=-1)[:, :2]

    router = SortingRouter()
    hook = FsdpRouterHook(router, index=0, layer=0, refusal=refuse)
    Given(hook, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="SortingRouter does not choose experts by one topk"):
        router(torch.rand(3, 4))


def test_rows_of_positions_and_positions_of_rows() -> None:
    shared = TokenRows.from_places(np.asarray([4, 5, 9, 10]), np.asarray([0, 1, 0, 3]), num_places=5)
    assert shared.at.tolist() == [9, 5, -1, 10, -1]
    alone = TokenRows.from_positions(np.asarray([7, -1, 3]))
    assert alone.rows.tolist() == [7, 3] and alone.places.tolist() == [0, 2]
