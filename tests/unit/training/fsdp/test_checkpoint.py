"""Checkpoints and exports of a trainer on one rank: exact resume, no pickle, and folders that transformers loads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlscale.errors import DataError
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.fsdp.backend import FsdpBackend
from tests.unit.training.fsdp.test_backend import UPDATED_REFERENCE, backend, train, weights
from tests.unit.training.rollouts import tiny_model

pytestmark = pytest.mark.usefixtures("world")


def test_a_loaded_trainer_continues_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    first = backend(model_path, lr_decay_style="linear")
    train(first)
    train(first)
    first.save(tmp_path)
    torch.rand(3)  # moves the generator on
    expected = [train(first).steps, torch.rand(3).tolist()]
    second = backend(model_path, lr_decay_style="linear")
    torch.rand(1)  # another state, which loading replaces
    second.load(tmp_path)
    torch.rand(3)
    assert [train(second).steps, torch.rand(3).tolist()] == expected
    other = weights(first)
    assert all(torch.equal(weight, other[name]) for name, weight in weights(second).items())


def test_a_trainer_saved_before_its_first_step_loads(model_path: str, tmp_path: Path) -> None:
    first, second = backend(model_path), backend(model_path)
    first.save(tmp_path)
    second.load(tmp_path)
    assert train(second).steps == train(first).steps


def test_no_file_of_a_checkpoint_is_pickled(model_path: str, tmp_path: Path) -> None:
    trainer = backend(model_path)
    train(trainer)
    trainer.save(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_loading_another_model_or_no_checkpoint_raises(model_path: str, cache: Path, tmp_path: Path) -> None:
    trainer = backend(model_path)
    with pytest.raises(DataError, match=r"trainer\.json must be a file of a trainer checkpoint"):
        trainer.load(tmp_path)
    other = backend(tiny_model(cache, tied=False))
    other.save(tmp_path)
    with pytest.raises(DataError, match=r"1 are unexpected, first model\.lm_head\.weight"):
        trainer.load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_what_transformers_loads(cache: Path, tmp_path: Path, tied: bool) -> None:
    path = tiny_model(cache, tied=tied)
    trainer = backend(path)
    train(trainer)
    trainer.export_hf(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings is tied
    expected, got = weights(trainer), dict(loaded.named_parameters())
    assert list(expected) == list(got)
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "hf", path))
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.chat_template == original.chat_template
    assert (
        loaded.generation_config.eos_token_id
        == load_causal_lm(path, dtype=torch.float32).generation_config.eos_token_id
    )
    # The next run can start from it.
    again = weights(backend(str(tmp_path / "hf")))
    assert all(torch.equal(again[name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_an_updated_reference_is_part_of_a_checkpoint(model_path: str, tmp_path: Path) -> None:
    first, second = (backend(model_path, algo=UPDATED_REFERENCE, ref_path=model_path) for _ in range(2))
    for _ in range(3):
        train(first)
    first.save(tmp_path)
    second.load(tmp_path)
    for _ in range(2):
        assert train(second).steps == train(first).steps
    assert any(name.startswith("reference.") for name in tensor_names(tmp_path))
    still = backend(model_path, algo={"use_kl_loss": True}, ref_path=model_path)
    (tmp_path / "still").mkdir()
    still.save(tmp_path / "still")
    assert not any(name.startswith("reference.") for name in tensor_names(tmp_path / "still"))


def tensor_names(folder: Path) -> list[str]:
    names: list[str] = []
    for file in sorted((folder / "tensors").glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    return names


def test_a_partly_frozen_model_resumes(model_path: str, tmp_path: Path) -> None:
    frozen = {"freeze_params": [r"layers\.0\."]}
    first = backend(model_path, **frozen)
    train(first)
    first.save(tmp_path)
    again = backend(model_path, **frozen)
    again.load(tmp_path)
    train(first)
    train(again)
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(first).items())


@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.slow
def test_a_model_with_a_part_that_is_never_used_resumes(model_path: str, tmp_path: Path, name: str) -> None:
    def with_unused_part() -> FsdpBackend:
        trainer = backend(model_path, name=name)
        part = torch.nn.Parameter(torch.ones(2, 2))
        trainer.policy.model.register_parameter("unused", part)
        trainer.policy.optimizer.param_groups[0]["params"].append(part)
        return trainer

    first, again = with_unused_part(), with_unused_part()
    train(first)
    first.save(tmp_path)
    again.load(tmp_path)
    assert train(again).steps == train(first).steps
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(first).items())


def test_rates_of_kinds_survive_a_checkpoint(model_path: str, tmp_path: Path) -> None:
    rates = {"lr": 1e-3, "matrix_lr": 4e-3}
    first = backend(model_path, **rates)
    train(first)
    first.save(tmp_path)
    again = backend(model_path, **rates)
    again.load(tmp_path)
    train(first)
    train(again)
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(first).items())
