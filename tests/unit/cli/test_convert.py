"""The command `rlscale-convert`."""

import sys
from pathlib import Path

import pytest

from rlscale.cli.convert import main, make_parser
from tests.weight_files import write_no_weights


def test_the_target_must_be_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["source", str(tmp_path)]) == 2
    assert f"TARGET must be a new folder, got {tmp_path}, which exists" in caplog.text


def test_the_source_must_be_of_either_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").touch()
    assert main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert (
        "SOURCE must be a Hugging Face folder (config.json) or one in Megatron-core's format "
        f"(torch_dist/metadata.json), got {tmp_path}; it has neither; check the path"
    ) in caplog.text


def test_the_help_describes_conversion_of_large_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    assert "torchrun" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/nope", "/x"], "SOURCE must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B"),
        (
            ["no/model", "/x"],
            "SOURCE must be in the local cache of Hugging Face with HF_HUB_OFFLINE=1, got no/model; download it where "
            "there is a network (hf download no/model), or unset HF_HUB_OFFLINE",
        ),
        (["{file}", "/x"], "SOURCE must be a folder, got '{file}'; it is a file; give its folder"),
        (
            ["{model}", "{file}/new"],
            "TARGET must be in a folder that can be written, got {file}/new; {file} is not one",
        ),
        (
            ["{model}", "/x", "--model", "/nope"],
            "--model must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        ),
        (["{model}", "/x", "--tensor-parallel", "0"], "--tensor-parallel must be at least 1, got 0"),
        (
            ["{model}", "/x", "--tensor-parallel", "3"],
            "--tensor-parallel times --pipeline-parallel must divide the number of processes (1), got 3; start it with "
            "torchrun --nproc-per-node <number>",
        ),
    ],
)
def test_each_wrong_argument_is_one_line(
    words: list[str],
    expected: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    file, model = tmp_path / "file", tmp_path / "model"
    file.touch()
    write_model(model, model_type="qwen3")
    named = {"file": str(file), "model": str(model)}
    assert main([word.format(**named) for word in words]) == 2
    assert caplog.text.splitlines()[-1].endswith(expected.format(**named))
    assert len(caplog.records) == 1


def test_megatron_core_must_be_installed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", model_type="qwen3")
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.setitem(sys.modules, "mbridge", None)
    assert main([str(tmp_path / "model"), str(tmp_path / "new"), "--mode", "bridge"]) == 2
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "rlscale-convert must have the package megatron-core; pip install 'rlscale[megatron]'",
        "rlscale-convert must have the package mbridge; pip install 'rlscale[bridge]'",
    ]


def test_a_model_that_megatron_core_does_not_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "model", model_type="gemma3")
    assert main([str(tmp_path / "model"), str(tmp_path / "new")]) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith("the model_type of SOURCE must be one of ")
    assert record.getMessage().endswith("got gemma3")
    assert "train" not in record.getMessage()


def write_model(folder: Path, *, model_type: str) -> None:
    """Files by which a folder is recognised as a Hugging Face checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "{model_type}", "num_hidden_layers": 1}}')
    write_no_weights(folder / "model.safetensors")


def test_variables_of_a_launcher_are_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", model_type="qwen3")
    monkeypatch.setenv("WORLD_SIZE", "all")
    assert main([str(tmp_path / "model"), str(tmp_path / "new")]) == 2
    assert caplog.text.splitlines()[-1].endswith("WORLD_SIZE must be a number, got all; unset it")
