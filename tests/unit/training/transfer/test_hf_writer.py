"""Hugging Face folders written tensor by tensor."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlscale.errors import DataError
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from rlscale.training.transfer.hf_writer import HfWriter, copy_model_files


def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((10,), float(i)) for i in range(5)}


@pytest.mark.parametrize(("most", "files"), [(10**6, ["model.safetensors"]), (80, 3), (1, 5)])
def test_files_are_filled_up_to_the_limit(most: int, files: int | list[str], tmp_path: Path) -> None:
    writer = HfWriter(folder=tmp_path, max_file_bytes=most)
    for name, tensor in weights().items():
        writer.add(name, tensor)
    writer.close()
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if isinstance(files, int):
        assert found == [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    else:
        assert found == files
    checkpoint = HfCheckpoint(str(tmp_path))
    assert checkpoint.files.keys() == weights().keys()
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in weights().items())
    assert writer.num_bytes == 5 * 40 and not list(tmp_path.glob(".part*"))


def test_a_tensor_is_copied_when_it_is_added(tmp_path: Path) -> None:
    writer, tensor = HfWriter(folder=tmp_path), torch.ones(3)
    writer.add("a", tensor)
    tensor.zero_()
    writer.close()
    assert HfCheckpoint(str(tmp_path)).tensor("a").tolist() == [1, 1, 1]


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"must contain config.json, got no such file"):
        copy_model_files(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(DataError, match=r"must contain model.safetensors.index.json or model.safetensors, got neither"):
        HfCheckpoint(str(tmp_path)).source("a")
    writer = HfWriter(folder=tmp_path)
    writer.add("a", torch.ones(3))
    writer.close()
    with pytest.raises(DataError, match=r"must contain b, got no such tensor"):
        HfCheckpoint(str(tmp_path)).source("b")


def test_experts_in_a_fused_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    gate_up, down = torch.arange(48.0).view(2, 6, 4), torch.arange(24.0).view(2, 4, 3)
    writer = HfWriter(folder=tmp_path)
    writer.add("l.mlp.experts.gate_up_proj", gate_up)
    writer.add("l.mlp.experts.down_proj", down)
    writer.close()
    checkpoint = HfCheckpoint(str(tmp_path))
    gate, up, last = (checkpoint.source(f"l.mlp.experts.1.{each}_proj.weight") for each in ("gate", "up", "down"))
    assert gate.shape == up.shape == (3, 4) and last.shape == (4, 3)
    assert torch.equal(gate.rows(slice(1, 3)), gate_up[1, 1:3])
    assert torch.equal(up.rows(slice(0, 2)), gate_up[1, 3:5])
    assert torch.equal(last.columns(slice(1, 3)), down[1, :, 1:3])


def test_the_float32_bias_does_not_count_as_a_second_dtype(tmp_path: Path) -> None:
    bias = {"model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(4)}
    save_file({"lm_head.weight": torch.ones(2, 2, dtype=torch.bfloat16), **bias}, tmp_path / "model.safetensors")
    assert HfCheckpoint(str(tmp_path)).dtypes() == {"BF16"}


def test_a_tensor_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    writer = HfWriter(folder=tmp_path)
    for name in ("tied", "other", "tied"):
        writer.add(name, torch.ones(4))
    writer.close()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["other", "tied"]
