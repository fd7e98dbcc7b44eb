"""Weights that are read by rows, compared with transformers' own loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlscale.errors import ConfigError
from rlscale.models.hf_models import build_causal_lm, load_causal_lm
from rlscale.models.hf_weights import HfWeights, open_causal_lm
from tests.unit.training.rollouts import tiny_latent, tiny_model, tiny_moe

MODELS = {
    "tied": tiny_model,
    "untied": lambda cache: tiny_model(cache, tied=False),
    "experts": tiny_moe,
    "latent": tiny_latent,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def fill(path: str) -> PreTrainedModel:
    """The model of a folder with all its rows, read one by one."""
    model, weights = open_causal_lm(path, attn_implementation="sdpa")
    assert weights is not None and all(parameter.is_meta for parameter in model.parameters())
    filled = model.state_dict()
    weights.check(filled)
    for name, tensor in filled.items():
        filled[name] = torch.full(tensor.shape, torch.nan)
        for i in range(len(tensor)):
            weights.copy_rows(name, filled[name][i : i + 1], first=i)
    model.load_state_dict(filled, assign=True)
    return model


def assert_equal_weights(model: PreTrainedModel, path: str) -> None:
    """Parameters and buffers must be those that transformers loads from the folder."""
    expected = load_causal_lm(path, dtype=torch.float32)
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    buffers, wanted_buffers = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted_buffers.keys() and any(name.endswith("inv_freq") for name in buffers)
    for name, tensor in wanted_buffers.items():
        assert buffers[name].device.type == "cpu" and torch.equal(buffers[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_the_one_that_transformers_loads(name: str, cache: Path) -> None:
    path = MODELS[name](cache)
    assert_equal_weights(fill(path), path)


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_several_files_in_bfloat16(name: str, cache: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS[name](cache), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal_weights(fill(str(tmp_path)), str(tmp_path))


def test_a_range_of_experts_is_stacked_alone(cache: Path) -> None:
    path = tiny_moe(cache)
    _, weights = open_causal_lm(path, attn_implementation="sdpa")
    assert weights is not None
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = load_causal_lm(path, dtype=torch.float32).get_parameter(name)
    rows = torch.empty(2, *expected.shape[1:])
    weights.copy_rows(name, rows, first=1)
    assert torch.equal(rows, expected[1:3])
    empty = torch.empty(0, *expected.shape[1:])
    weights.copy_rows(name, empty, first=len(expected))


def changed(path: str, folder: Path, change: Any) -> str:
    """A copy of a model with other weights."""
    for file in Path(path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_tied_weight_may_have_any_of_its_names(cache: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    path = changed(tiny_model(cache), tmp_path, rename)
    assert_equal_weights(fill(path), path)


@pytest.mark.parametrize("differ", [False, True])
def test_a_tied_weight_that_is_there_twice(differ: bool, cache: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differ)

    path = changed(tiny_model(cache), tmp_path, add)
    model, _ = open_causal_lm(path, attn_implementation="sdpa")
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied != differ
    assert_equal_weights(fill(path), path)


def test_missing_weights_and_other_shapes_are_named(cache: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()

    path = changed(tiny_model(cache), tmp_path, drop)
    _, weights = open_causal_lm(path, attn_implementation="sdpa")
    assert weights is not None
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must contain every weight .*model\.norm\.weight"):
        weights.check(["model.norm.weight", "model.embed_tokens.weight"])
    with pytest.raises(ConfigError, match=r"must have the shapes .*embed_tokens\.weight has the shape \(\d+, 32\)"):
        weights.check(["model.embed_tokens.weight"])
    weights.check(["model.layers.0.self_attn.q_proj.weight"])


def test_a_file_that_is_none_is_named(cache: Path, tmp_path: Path) -> None:
    path = changed(tiny_model(cache), tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors must be a safetensors file"):
        HfWeights(path, build_causal_lm(path, dtype=torch.float32))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HfWeights(path, build_causal_lm(path, dtype=torch.float32))
