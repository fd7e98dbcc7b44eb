"""Configuration and tokenizer of an exported folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from rlscale.training.transfer.hf_folder import write_model_files
from tests.unit.training.rollouts import tiny_model

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("has_file", [True, False])
def test_a_hub_id_may_lack_settings_of_generation(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository, name = tmp_path / "models--me--mine", "generation_config.json"
    snapshot = repository / "snapshots" / "1"
    shutil.copytree(tiny_model(cache), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    (snapshot / name).unlink(missing_ok=True)
    if has_file:
        (snapshot / name).write_text('{"temperature": 0.25, "do_sample": true}')
    else:  # as huggingface_hub remembers what a repository does not have
        (repository / ".no_exist" / "1").mkdir(parents=True)
        (repository / ".no_exist" / "1" / name).touch()
    write_model_files(tmp_path / "export", source="me/mine", dtype=torch.float32)
    files = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"config.json", "tokenizer_config.json"} <= files and (name in files) == has_file


def test_the_configuration_declares_no_quantised_weights(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model(cache), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    write_model_files(tmp_path / "export", source=str(source), dtype=torch.float32)
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in written and written["dtype"] == "float32"
