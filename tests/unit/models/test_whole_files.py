"""A weight file that was cut off, or is missing, is found from headers alone."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlscale.config import ModelConfig
from rlscale.errors import ConfigError
from rlscale.models.model_path import check_model_path
from rlscale.models.resolve_model import check_checkpoint
from rlscale.models.whole_files import find_incomplete


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with their index."""
    for i in (1, 2):
        save_file({f"w{i}": torch.zeros(5, 7), "empty": torch.zeros(0)}, tmp_path / f"part-{i}.safetensors")
    names = {"w1": "part-1.safetensors", "w2": "part-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path


def test_whole_files_are_whole(folder: Path) -> None:
    assert find_incomplete(folder) == ""
    assert check_model_path(str(folder), name="SOURCE") == []
    check_checkpoint(folder, ModelConfig())


def damage_header(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"x" + content[9:])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Path.unlink, "is missing"),
        (lambda file: os.truncate(file, 0), "is cut off, or no safetensors file: it has 0 bytes"),
        (lambda file: os.truncate(file, 40), "is cut off, or no safetensors file: it has 40 bytes"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes of"),
        (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1"), "no safetensors file"),
        (damage_header, "has a damaged header"),
    ],
)
def test_a_damaged_file_is_named_before_the_start(damage: object, text: str, folder: Path) -> None:
    assert callable(damage)
    damage(folder / "part-2.safetensors")
    assert find_incomplete(folder).startswith("part-2.safetensors ") and text in find_incomplete(folder)
    (problem,) = check_model_path(str(folder), name="SOURCE")
    assert str(problem).startswith(f"SOURCE must be a folder with complete weights, got '{folder}'; part-2.safetensors")
    with pytest.raises(ConfigError, match=r"complete weights, .* download or copy it again$"):
        check_checkpoint(folder, ModelConfig())
