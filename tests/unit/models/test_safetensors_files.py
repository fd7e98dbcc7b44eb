"""Tensors of safetensors files as views of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlscale.models.safetensors_files import MappedFiles, map_tensors


def test_every_dtype_is_a_view_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "half": torch.arange(6).bfloat16().view(2, 3),
        "whole": torch.arange(4.0),
        "number": torch.tensor(7),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = map_tensors(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_several_files_and_a_change_of_one(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    map_tensors(tmp_path / "a.safetensors", writable=True)["a"][1] = 5
    files = MappedFiles([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert files.names == ["a", "b"] and files.tensor("a").tolist() == [0, 5, 0]


def test_a_tensor_between_two_elements_is_copied(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((1 - len(header)) % 4)  # a length that no element can be aligned to
    data = torch.tensor([1.5, 2.5]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert len(header) % 4 == 1
    assert map_tensors(tmp_path / "x.safetensors")["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("content", [b"", b"short", (10**15).to_bytes(8, "little") + b"{}", bytes(8) + b"{}"])
def test_another_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors must be a safetensors file, got one that cannot be read"):
        map_tensors(tmp_path / "x.safetensors")
