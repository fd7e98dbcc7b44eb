"""All optimisers on two ranks: the numbers of one rank, and an exact resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlscale.training.fsdp.backend import FsdpBackend
from tests.planned_checkpoint import planned_size, tensor_bytes
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.optimizer_ranks import BATCHES, ONE_RANK, case_spec, run
from tests.ranks.training.optimizer_ranks import CASES as ALL_CASES
from tests.unit.training.rollouts import plan

pytestmark = pytest.mark.usefixtures("world")
CASES = [case for case in ALL_CASES if case != "lora"]


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("optimizers")
    for case in CASES:
        (folder / case).mkdir()
    run_ranks("tests.ranks.training.optimizer_ranks", model_path, str(folder), *CASES)
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on one rank: norms, final weights, and the folder of the checkpoint."""
    found = {}
    for case in CASES:
        saved = tmp_path_factory.mktemp(case)
        norms, trainer = run(case, model_path, rank=0, world_size=1, folder=saved)
        found[case] = (norms, {name: weight.clone() for name, weight in trainer.weights()}, saved)
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(case: str, folder: Path, alone: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        ("muon", ("optim.name=muon",)),
        ("frozen_and_recomputed", ("train.freeze_params=[embed_tokens,'layers[.]0[.]']",)),
    ],
)
def test_the_checkpoint_has_the_bytes_of_the_plan(
    case: str, overrides: tuple[str, ...], folder: Path, model_path: str
) -> None:
    size, found = planned_size(model_path, *overrides), tensor_bytes(folder / case / "tensors")
    assert found.pop("model") == size.weights
    assert sum(found.values()) == size.optimizer


def test_a_step_on_the_host_is_the_same_step(folder: Path, alone: dict[str, Any]) -> None:
    assert alone["deepspeed_cpu_adam"][0] == alone["adam"][0]
    for name, weight in alone["adam"][1].items():
        assert torch.equal(alone["deepspeed_cpu_adam"][1][name], weight), name
    host, plain = (load_file(folder / f"{name}.safetensors") for name in ("deepspeed_cpu_adam", "adam"))
    assert all(torch.equal(host[name], weight) for name, weight in plain.items())
