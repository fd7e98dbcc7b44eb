"""Every optimiser in the trainer on one rank: moments, learning rates by kind, and weight decay."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rlscale.config import OptimizerName
from rlscale.training.fsdp.backend import FsdpBackend
from tests.ranks.training.optimizer_ranks import BATCHES, ONE_RANK, run
from tests.unit.training.rollouts import plan, spec, tiny_moe

pytestmark = pytest.mark.usefixtures("world")


def test_muon_has_one_moment_of_matrices_and_two_of_other_parameters(model_path: str, tmp_path: Path) -> None:
    run("muon", model_path, rank=0, world_size=1, folder=tmp_path)
    moments: dict[str, set[str]] = {}
    for file in (tmp_path / "tensors").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a mapping
                moment, name = key.split(".", 1)
                moments.setdefault(name, set()).add(moment)
    for name, kept in moments.items():
        is_matrix = "proj" in name
        assert kept == ({"model", "momentum_buffer"} if is_matrix else {"model", "exp_avg", "exp_avg_sq"}), name


def test_muon_steps_matrices_at_their_rate_and_other_parameters_at_theirs(model_path: str) -> None:
    fields = {"name": OptimizerName.muon, "lr": 1e-3, "matrix_lr": 0.02, "embedding_lr": 4e-3}
    trainer = FsdpBackend(spec(model_path, **fields), rank=0, world_size=1)
    before = {name: weight.clone() for name, weight in trainer.weights()}
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    for name, weight in trainer.weights():
        change = weight - before[name]
        if "proj" in name:
            scale = 0.02 * max(1.0, change.shape[0] / change.shape[1]) ** 0.5
            # The update is orthogonalised: its singular values are about the rate times Muon's scale.
            values = torch.linalg.svdvals(change) / scale
            assert 0.9 < values.max() < 1.3, name  # of a gradient of low rank some stay 0
        else:
            rate = 4e-3 if "embed" in name else 1e-3
            assert float(change.abs().max()) == pytest.approx(rate, rel=0.05), name


def test_muon_steps_each_expert_separately(cache: Path) -> None:
    trainer = FsdpBackend(spec(tiny_moe(cache), name=OptimizerName.muon, lr=0.02), rank=0, world_size=1)
    before = {name: weight.clone() for name, weight in trainer.weights() if ".experts." in name}
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    after = dict(trainer.weights())
    # An orthogonalised stack as a whole would have other singular values per expert.
    largest = {name: torch.linalg.svdvals(after[name] - weight).max() for name, weight in before.items()}
    assert before and all(0.01 < value < 0.05 for name, value in largest.items()), largest


def test_weight_decay_shrinks_weights_without_a_gradient_direction(model_path: str) -> None:
    # With a rate and a decay alone (gradients clipped to nothing, moments 0) a step is w * (1 - lr * decay).
    for name in OptimizerName:
        fields = {"name": name, "lr": 0.1, "weight_decay": 0.5, "clip_grad": 1e-30, "adam_eps": 1.0}
        trainer = FsdpBackend(spec(model_path, **fields), rank=0, world_size=1)
        before = {each: weight.clone() for each, weight in trainer.weights()}
        trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
        for each, weight in trainer.weights():
            torch.testing.assert_close(weight, before[each] * 0.95, atol=1e-6, rtol=1e-5, msg=f"{name} {each}")
