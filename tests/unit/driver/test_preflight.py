"""Checks of files and packages before Ray starts, mainly of `checkpoint.load`."""

import json
import sys
from pathlib import Path

import pytest

from rlscale.config import RunConfig, TrainBackendName, load_config
from rlscale.config.groups.model import MegatronToHf
from rlscale.driver.preflight import _check_bridge, _check_start, check_files
from rlscale.driver.trainer_spec import is_bare_weights, model_source, starting_weights
from rlscale.models.megatron_folder import torch_dist_folder
from tests.unit.config.rules.valid_config import config_with


def make_weights(folder: Path) -> Path:
    """The file by which a folder in Megatron-core's format is recognised."""
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def config(load: Path, backend: TrainBackendName = TrainBackendName.megatron) -> RunConfig:
    return config_with({"train.backend": backend, "checkpoint.load": str(load)})


def test_the_format_of_megatron_core_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    ours = make_weights(tmp_path / "ours" / "torch_dist")
    assert torch_dist_folder(tmp_path / "ours") == torch_dist_folder(ours) == ours
    theirs = make_weights(tmp_path / "theirs" / "iter_0000012")
    make_weights(tmp_path / "theirs" / "iter_0000011")
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert torch_dist_folder(tmp_path / "theirs") == torch_dist_folder(theirs) == theirs
    released = make_weights(tmp_path / "released" / "release")
    (tmp_path / "released" / "latest_checkpointed_iteration.txt").write_text("release")
    assert torch_dist_folder(tmp_path / "released") == released


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"sharded_backend": "zarr"}'])
def test_other_formats_are_not(content: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(content)
    assert torch_dist_folder(tmp_path) is None and torch_dist_folder(tmp_path / "nowhere") is None


def test_a_run_starts_from_bare_weights(tmp_path: Path) -> None:
    make_weights(tmp_path / "torch_dist")
    assert _check_start(config(tmp_path)) == []
    assert starting_weights(config(tmp_path)) == tmp_path
    source = model_source(str(tmp_path), key="model.ref_load", base="/base")
    assert (source.path, source.checkpoint) == ("/base", tmp_path)


def test_a_run_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "rollout_00000003"
    make_weights(folder / "torch_dist")
    (folder / "checkpoint.json").write_text(json.dumps({"format": 1, "rollout_id": 3, "state": {}}))
    for load in (folder, tmp_path):
        assert not is_bare_weights(str(load)) and starting_weights(config(load)) is None
        assert _check_start(config(load)) == []


def test_fsdp_does_not_read_the_format_of_megatron_core(tmp_path: Path) -> None:
    make_weights(tmp_path / "torch_dist")
    (problem,) = _check_start(config(tmp_path, TrainBackendName.fsdp))
    assert str(problem) == (
        f"checkpoint.load must be a Hugging Face folder or a checkpoint of a run with train.backend=fsdp, got "
        f"{tmp_path}; it is in Megatron-core's format; convert it: rlscale-convert {tmp_path} <new folder>"
    )


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    (problem,) = _check_start(config(tmp_path))
    assert str(problem) == (
        "checkpoint.load must name a Hugging Face folder, a checkpoint of a run or a folder in Megatron-core's format "
        f"(torch_dist), got {str(tmp_path)!r}; it has no config.json, no checkpoint.json and no "
        "torch_dist/metadata.json; check the path"
    )
    unfinished = tmp_path / "rollout_00000003.saving"
    unfinished.mkdir()
    (problem,) = _check_start(config(unfinished))
    assert "that save was never completed" in str(problem)


def test_mbridge_must_be_installed_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    bridged = config_with(
        {"train.backend": TrainBackendName.megatron, "model.megatron_to_hf_mode": MegatronToHf.bridge}
    )
    assert _check_bridge(bridged) == []
    monkeypatch.setitem(sys.modules, "mbridge", None)
    (problem,) = _check_bridge(bridged)
    assert str(problem) == (
        "model.megatron_to_hf_mode must be raw without mbridge, got bridge; pip install 'rlscale[bridge]', or remove it"
    )
    assert _check_bridge(config_with({"train.backend": TrainBackendName.fsdp})) == []


def test_a_field_that_the_checkpoint_contradicts_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 7, "architectures": ["Qwen3ForCausalLM"]}', "utf-8")
    (tmp_path / "model.safetensors").touch()
    run = load_config(["experiment=quickstart", "model=qwen3_4b", f"model.hf_checkpoint={tmp_path}"])
    (found,) = [problem for problem in check_files(run) if "config.json" in problem.rule]
    assert (found.path, found.value) == ("model.num_layers", "36")
    assert found.rule == f"be 7, as in config.json of '{tmp_path}'"
