"""Adapters of low rank: trained alone, merged for engines, saved as peft reads them, resumed bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlscale.config import ComputeDtype, LoraConfig
from rlscale.errors import ConfigError
from rlscale.training.fsdp.backend import FsdpBackend
from tests.unit.training.launch import report, run_ranks
from tests.unit.training.optimizer_ranks import BATCHES, CASES, ONE_RANK, case_spec, run
from tests.unit.training.rollouts import plan, spec

pytestmark = pytest.mark.usefixtures("world")
LORA = CASES["lora"]["lora"]


def trained(model_path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(case_spec("lora", model_path, **changes), rank=0, world_size=1)


def weights(trainer: FsdpBackend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 13)[None]).logits
    return found


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "lora").mkdir()
    run_ranks("tests.unit.training.optimizer_ranks", model_path, str(folder), "lora")
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], FsdpBackend]:
    return run("lora", model_path, rank=0, world_size=1, folder=tmp_path_factory.mktemp("alone"))


def test_new_adapters_change_nothing_and_training_them_changes_the_layers_they_are_in(model_path: str) -> None:
    trainer, plain = trained(model_path), FsdpBackend(spec(model_path), rank=0, world_size=1)
    before = weights(trainer)
    assert before.keys() == weights(plain).keys()
    assert all(torch.equal(weight, before[name]) for name, weight in plain.weights())
    first = trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0]
    assert first["loss"] == pytest.approx(plain.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0]["loss"])
    changed = {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "proj" in name}


def test_only_the_layers_that_are_named_get_adapters(model_path: str) -> None:
    trainer = trained(model_path, lora=LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]))
    before = weights(trainer)
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    changes = {name: weight - before[name] for name, weight in weights(trainer).items()}
    changed = {name for name, change in changes.items() if change.any()}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    assert all(torch.linalg.matrix_rank(changes[name], rtol=1e-4) <= 2 for name in changed)


def test_what_is_sent_and_exported_is_the_model_that_was_trained(alone: Any, model_path: str, tmp_path: Path) -> None:
    _, trainer = alone
    trainer.export_hf(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, dict(merged.named_parameters())[name]) for name, weight in trainer.weights())
    base = AutoModelForCausalLM.from_pretrained(model_path)
    before = logits(base)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(with_adapter), logits(merged), atol=1e-5, rtol=1e-5)
    assert (before - logits(merged)).abs().max() > 1e-3


def test_a_run_may_begin_with_adapters_of_a_file(alone: Any, model_path: str, tmp_path: Path) -> None:
    _, trainer = alone
    trainer.export_hf(tmp_path)
    lora = LoraConfig(rank=4, alpha=8, load=str(tmp_path / "adapter"))
    begun = trained(model_path, lora=lora)
    assert all(torch.equal(weight, weights(trainer)[name]) for name, weight in begun.weights())
    told = "train.lora.load must hold adapters of this model and rank, got"
    with pytest.raises(ConfigError, match=re.escape(told) + r".*is \(4, 48\) there and \(2, 48\) here"):
        trained(model_path, lora=LoraConfig(rank=2, load=str(tmp_path / "adapter")))
    with pytest.raises(ConfigError, match=r"train\.lora\.load must be a folder of adapters in peft's format, got /no"):
        trained(model_path, lora=LoraConfig(rank=2, load="/no/such"))


def test_layers_that_are_not_there_are_told(model_path: str) -> None:
    told = "train.lora.target_modules must name linear layers of the model, got ['query']; it has down_proj, gate_proj"
    with pytest.raises(ConfigError, match=re.escape(told)):
        trained(model_path, lora=LoraConfig(rank=2, target_modules=["query"]))


def test_two_ranks_do_what_one_does_and_go_on_exactly(folder: Path, alone: Any, model_path: str) -> None:
    norms, trainer = alone
    for rank in range(2):
        assert report(folder, rank)["lora"]["norms"] == pytest.approx(norms, rel=1e-4)
        assert report(folder, rank)["lora"]["resumed_exactly"]
    final = load_file(folder / "lora.safetensors")
    for name, weight in trainer.weights():
        torch.testing.assert_close(final[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    adapters = load_file(folder / "lora" / "hf" / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 2 and all("lora_" in name for name in adapters)  # A and B of 7 layers, twice
    resumed = trained(model_path)
    resumed.load(folder / "lora")
    result = resumed.train(BATCHES[2], [plan(BATCHES[2], ONE_RANK)])
    assert result.steps[0]["grad_norm"] == pytest.approx(norms[2], rel=1e-4)


def test_the_optimiser_keeps_moments_of_adapters_only(folder: Path) -> None:
    moments = set()
    for file in (folder / "lora" / "tensors").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            moments |= {key for key in tensors.keys() if key.startswith("exp_avg.")}  # noqa: SIM118  # not a mapping
    assert moments and all(".lora_A." in name or ".lora_B." in name for name in moments)


@pytest.mark.parametrize("dtype", list(ComputeDtype))
def test_trainer_and_engine_have_the_same_model(model_path: str, dtype: ComputeDtype, tmp_path: Path) -> None:
    trainer = trained(model_path, dtype=dtype, gradient_checkpointing=True, lora=LORA)
    for batch in BATCHES:
        trainer.train(batch, [plan(batch, ONE_RANK)])
    trainer.export_hf(tmp_path)
    merged = FsdpBackend(spec(str(tmp_path), dtype=dtype), rank=0, world_size=1)
    steps = [each.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0] for each in (trainer, merged)]
    assert steps[0]["entropy"] == pytest.approx(steps[1]["entropy"], rel=1e-5 if dtype == "float32" else 1e-2)
