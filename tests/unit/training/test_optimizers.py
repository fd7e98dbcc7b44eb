"""Every optimiser in the trainer, on one rank and on two; what they keep survives a checkpoint bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlscale.config import OptimizerName
from rlscale.training.fsdp.backend import FsdpBackend
from tests.unit.training.launch import report, run_ranks
from tests.unit.training.optimizer_ranks import BATCHES, ONE_RANK, case_spec, run
from tests.unit.training.optimizer_ranks import CASES as ALL_CASES
from tests.unit.training.rollouts import plan, spec, tiny_moe

pytestmark = pytest.mark.usefixtures("world")
CASES = [case for case in ALL_CASES if case != "lora"]


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind; they run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("optimizers")
    for case in CASES:
        (folder / case).mkdir()
    run_ranks("tests.unit.training.optimizer_ranks", model_path, str(folder), *CASES)
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on one rank: norms and final weights, and where the trainer was saved."""
    found = {}
    for case in CASES:
        saved = tmp_path_factory.mktemp(case)
        norms, trainer = run(case, model_path, rank=0, world_size=1, folder=saved)
        found[case] = (norms, {name: weight.clone() for name, weight in trainer.weights()}, saved)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(case: str, folder: Path, alone: dict[str, Any]) -> None:
    norms, weights, _ = alone[case]
    assert report(folder, 0)[case]["norms"] == pytest.approx(norms, rel=1e-4)
    final = load_file(folder / f"{case}.safetensors")
    assert weights.keys() == final.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, atol=2e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_resuming_is_exact(case: str, folder: Path, model_path: str, alone: dict[str, Any]) -> None:
    assert report(folder, 0)[case]["resumed_exactly"] and report(folder, 1)[case]["resumed_exactly"]
    _, weights, saved = alone[case]
    trainer = FsdpBackend(case_spec(case, model_path), rank=0, world_size=1)
    trainer.load(saved)
    trainer.train(BATCHES[2], [plan(BATCHES[2], ONE_RANK)])
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.weights())


def test_a_step_on_the_host_is_the_same_step(folder: Path, alone: dict[str, Any]) -> None:
    assert alone["deepspeed_cpu_adam"][0] == alone["adam"][0]
    for name, weight in alone["adam"][1].items():
        assert torch.equal(alone["deepspeed_cpu_adam"][1][name], weight), name
    host, plain = (load_file(folder / f"{name}.safetensors") for name in ("deepspeed_cpu_adam", "adam"))
    assert all(torch.equal(host[name], weight) for name, weight in plain.items())


def test_muon_keeps_one_moment_of_matrices_and_adam_two_of_the_rest(alone: dict[str, Any]) -> None:
    moments: dict[str, set[str]] = {}
    for file in (alone["muon"][2] / "tensors").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a mapping
                moment, name = key.split(".", 1)
                moments.setdefault(name, set()).add(moment)
    for name, kept in moments.items():
        is_matrix = "proj" in name
        assert kept == ({"model", "momentum_buffer"} if is_matrix else {"model", "exp_avg", "exp_avg_sq"}), name


def test_muon_turns_matrices_at_their_rate_and_the_rest_at_its_own(model_path: str) -> None:
    fields = {"name": OptimizerName.muon, "lr": 1e-3, "matrix_lr": 0.02, "embedding_lr": 4e-3}
    trainer = FsdpBackend(spec(model_path, **fields), rank=0, world_size=1)
    before = {name: weight.clone() for name, weight in trainer.weights()}
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    for name, weight in trainer.weights():
        change = weight - before[name]
        if "proj" in name:
            scale = 0.02 * max(1.0, change.shape[0] / change.shape[1]) ** 0.5
            values = torch.linalg.svdvals(change) / scale
            assert 0.9 < values.max() < 1.3, name  # of a gradient of low rank some stay 0
        else:
            rate = 4e-3 if "embed" in name else 1e-3
            assert float(change.abs().max()) == pytest.approx(rate, rel=0.05), name


def test_muon_steps_each_expert_by_itself(cache: Path) -> None:
    trainer = FsdpBackend(spec(tiny_moe(cache), name=OptimizerName.muon, lr=0.02), rank=0, world_size=1)
    before = {name: weight.clone() for name, weight in trainer.weights() if ".experts." in name}
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    after = dict(trainer.weights())
    largest = {name: torch.linalg.svdvals(after[name] - weight).max() for name, weight in before.items()}
    assert before and all(0.01 < value < 0.05 for name, value in largest.items()), largest


def test_weight_decay_shrinks_what_has_no_gradient_direction(model_path: str) -> None:
    # With a rate and a decay alone (gradients clipped to nothing, moments 0) a step is w * (1 - lr * decay).
    for name in OptimizerName:
        fields = {"name": name, "lr": 0.1, "weight_decay": 0.5, "clip_grad": 1e-30, "adam_eps": 1.0}
        trainer = FsdpBackend(spec(model_path, **fields), rank=0, world_size=1)
        before = {each: weight.clone() for each, weight in trainer.weights()}
        trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
        for each, weight in trainer.weights():
            torch.testing.assert_close(weight, before[each] * 0.95, atol=1e-6, rtol=1e-5, msg=f"{name} {each}")
