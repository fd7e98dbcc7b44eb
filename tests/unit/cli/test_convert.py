"""The command `rlscale-convert`."""

from pathlib import Path

import pytest

from rlscale.cli.convert import main, make_parser


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
