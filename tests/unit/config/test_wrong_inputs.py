"""Wrong command lines and files: refused with the path, exit code 2 and no traceback, before anything starts."""

import csv
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlscale.cli.app import main_train
from rlscale.config import RunConfig
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import parse_command_line

DATA = Path(__file__).parents[2] / "data"
GROUPS = ConfigFolders.find().groups()
WRONG_INPUT = 2
PLACEHOLDER = re.compile(r"<\w[\w .|:]*>")

MINE = """\
# @package _global_
{defaults}
data:
  num_rollout: 1
  prompt_data: x.jsonl
"""
DEFAULTS = """\
defaults:
  - override /model: tiny_qwen3
  - override /rollout: embedded
  - override /train: fsdp
  - override /cluster: cpu
"""


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def start_nothing(config: RunConfig) -> None:
    raise AssertionError(f"a wrong input must start nothing, got {config.run.overrides}")


def errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the errors of a command that is refused."""
    assert main_train(argv, make_job=start_nothing) == WRONG_INPUT  # type: ignore[arg-type]  # never returns a job
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert not any(text in err for text in ("omegaconf", "OmegaConf", "full_key", "object_type"))
    return [line.removeprefix("  ") for line in err.splitlines() if line.startswith("  ")]


def overrides_in(line: str) -> list[str]:
    """The overrides that an advice says to write, without those with a placeholder."""
    fix = line.partition("; ")[2]
    found = re.findall(r"(?:write|did you mean) ('[^']*=[^']*'|[a-z_.]+=[^\s;?,]+)", fix)
    return [shlex.split(each)[0] for each in found if not PLACEHOLDER.search(each)]


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("wrong_lines.csv"), ids=lambda row: row["command"])
def test_a_wrong_command_line_is_refused(row: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = errors(shlex.split(row["command"]), capsys)
    lines = [each for each in found if each.startswith(f"{row['path']} must ")]
    assert lines and all("; " in line for line in lines), found  # each has an advice
    for override in [override for line in lines for override in overrides_in(line)]:
        assert parse_command_line([override], GROUPS).problems == [], lines


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("wrong_files.csv"), ids=lambda row: row["text"])
def test_a_wrong_file_is_refused(row: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    text = row["text"].replace("\\n", "\n").replace("\\t", "\t")
    own = MINE.format(defaults="" if text.startswith("defaults") else DEFAULTS)
    file.write_text(f"{own}{text}\n", encoding="utf-8")
    found = errors(["--config-dir", str(tmp_path), "experiment=mine", "batch.rollout_batch_size=4"], capsys)
    path = row["path"].format(file=file)
    line = next(each for each in found if each.startswith(f"{path} must "))
    assert f"{file}:" in line
    # A file has no overrides: its advice is YAML.
    assert not re.search(r"(write|did you mean) '?[a-z_.]+=", line) or "on a command line" in line


def test_there_are_as_many_as_promised() -> None:
    assert len(rows("wrong_lines.csv")) + len(rows("wrong_files.csv")) >= 500
