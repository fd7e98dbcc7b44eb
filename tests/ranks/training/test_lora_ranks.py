"""Low-rank adapters on two ranks: the numbers of one rank, an exact resume, and moments of adapters only."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlscale.training.fsdp.backend import FsdpBackend
from tests.planned_checkpoint import planned_size, tensor_bytes
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.optimizer_ranks import BATCHES, ONE_RANK, case_spec, run
from tests.unit.training.rollouts import plan, spec

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "lora").mkdir()
    run_ranks("tests.ranks.training.optimizer_ranks", model_path, str(folder), "lora")
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], FsdpBackend]:
    return run("lora", model_path, rank=0, world_size=1, folder=tmp_path_factory.mktemp("alone"))


def test_two_ranks_train_as_one_and_resume_exactly(
    folder: Path, alone: tuple[list[float], FsdpBackend], model_path: str
) -> None:
    norms, trainer = alone
    for rank in range(2):
        assert report(folder, rank)["lora"]["norms"] == pytest.approx(norms, rel=1e-4)
        assert report(folder, rank)["lora"]["resumed_exactly"]
    final = load_file(folder / "lora.safetensors")
    for name, weight in trainer.weights():
        torch.testing.assert_close(final[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    adapters = load_file(folder / "lora" / "hf" / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 2 and all("lora_" in name for name in adapters)  # A and B of 7 layers, twice
    sent = {part: load_file(folder / f"lora_{part}.safetensors") for part in ("adapters", "base")}
    assert sent["adapters"].keys() == adapters.keys()
    assert all(torch.equal(sent["adapters"][name], adapters[name]) for name in adapters)
    plain = dict(FsdpBackend(spec(model_path), rank=0, world_size=1).weights())
    assert sent["base"].keys() == plain.keys() and all(torch.equal(sent["base"][name], plain[name]) for name in plain)
    resumed = FsdpBackend(case_spec("lora", model_path), rank=0, world_size=1)
    resumed.load(folder / "lora")
    result = resumed.train(BATCHES[2], [plan(BATCHES[2], ONE_RANK)])
    assert result.steps[0]["grad_norm"] == pytest.approx(norms[2], rel=1e-4)


def test_the_checkpoint_has_the_bytes_of_the_plan(folder: Path, model_path: str) -> None:
    size, found = planned_size(model_path, "train.lora.rank=4"), tensor_bytes(folder / "lora" / "tensors")
    assert found == {"model": size.weights, "exp_avg": size.optimizer / 2, "exp_avg_sq": size.optimizer / 2}


def test_the_optimiser_has_moments_of_adapters_only(folder: Path) -> None:
    moments = set()
    for file in (folder / "lora" / "tensors").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            moments |= {key for key in tensors.keys() if key.startswith("exp_avg.")}  # noqa: SIM118  # not a mapping
    assert moments and all(".lora_A." in name or ".lora_B." in name for name in moments)
