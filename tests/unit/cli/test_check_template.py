"""The command `rlscale-check-template`."""

import json
from pathlib import Path

import pytest

from rlscale.cli.check_template import main
from tests.family_tokenizers import family_tokenizer


def test_a_model_that_is_built_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny_qwen3_agent"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny_qwen3_agent: renderer compact by its chat template"
    assert lines[-1] == "no check failed"
    assert any("round trip of a tool call" in line and " ok " in line for line in lines)


def test_forks_are_counted_and_do_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family_tokenizer("looks_back").save_pretrained(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no check failed, 4 kinds of turns fork"


def test_json_has_the_checks_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family_tokenizer("qwen").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert main([str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["renderer"] == "qwen3" and content["checks"]["masks"]["verdict"] == "ok"


def test_a_failed_check_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The format of the answers is not that of the template.
    assert main(["tiny_qwen3_agent", "--renderer=hermes"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 checks failed"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "<model> must be one model, got nothing; write rlscale-check-template tiny_qwen3_agent"),
        (["a", "b"], "<model> must be one model, got a b; write"),
        (["model=tiny_qwen3"], "<model> must stand without a key, got model=tiny_qwen3; write tiny_qwen3"),
        (["a", "--rendere=x"], "--rendere must be a known flag, got --rendere=x; did you mean --renderer?"),
        (["a", "--renderer"], "--renderer must have a value, got nothing; write --renderer auto"),
        (["tiny_qwen3", "--renderer=x"], "--renderer must fit the model, got x; renderer must be one of auto"),
        (["tests"], "<model> must have a tokenizer, got tests;"),
        (["/gone/folder"], "<model> must name an existing folder or a hub id, got /gone/folder; e.g. Qwen/Qwen3-4B"),
        (["tiny_qwen3_agnt"], "<model> must name an existing folder or a hub id, got tiny_qwen3_agnt; did you mean"),
        (["/dev/null"], "<model> must be a folder or a hub id, got /dev/null; it is a file; give its folder"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    heading, problem = capsys.readouterr().err.splitlines()
    assert heading == "rlscale-check-template: 1 error, nothing was started"
    assert problem.strip().startswith(line)


def test_help_names_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "tiny_qwen3_agent" in capsys.readouterr().out
