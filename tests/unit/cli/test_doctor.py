"""Arguments of `rlscale-doctor`. Running checks is tested in tests/ranks/doctor and tests/integration."""

from pathlib import Path

import pytest

from rlscale.cli.doctor import main


def test_the_list_has_every_check_with_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--deadline-scale", "2", "--only", "ray", "machine"]) == 0
    assert capsys.readouterr().out == ("machine          16 s  Driver, memory and disk\nray              30 s  Ray\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "x"], "--only must name checks"),
        (["--skip", "x"], "--skip must name checks"),
        (["--deadline-scale", "0"], "--deadline-scale must be above 0 and at most 100, got 0; remove it to use 1"),
        (["--out", __file__], "--out must name a folder that can be written, got "),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rlscale-doctor: ") and message in line


def test_argparse_refuses_an_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--device", "tpu"])
    assert error.value.code == 2
