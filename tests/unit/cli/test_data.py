"""The command `rlscale-data`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.cli.data import main
from rlscale.data.downloads import DATASETS


def write(file: Path, *rows: Any) -> str:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def test_rows_fields_lengths_and_reasons_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"question": f"{i}+1=", "answer": i + 1, "level": None if i else "easy"} for i in range(9)]
    path = write(tmp_path / "a.jsonl", *good, {"question": "", "answer": 1}, "{", {"question": "1+1="})
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "rows: 12\n" in out and "assumed: data.input_key=question data.label_key=answer" in out
    assert "level" in out and "null 8, string 1" in out
    # `user: 0+1=`, the end of the line, `assistant: `.
    assert "length of prompts in characters: shortest 22, median 22, 90 % 22, 99 % 22, longest 22" in out
    assert f"dropped: 3 of 12\n  1 empty prompt; the first one: {path} row 10 must have a prompt" in out
    assert f"1 no JSON; the first one: {path} row 11 must be" in out
    assert "1 no field 'answer'; the first one" in out
    assert out.count("user: ") == 3 and "row 1, 22 characters" in out and "label: 1" in out


def test_a_model_gives_template_tokens_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "1" * 40, "label": "2"}]
    path = write(tmp_path / "a.jsonl", *rows)
    words = ["+experiment=quickstart", f"model.cache_dir={tmp_path / 'models'}", "rollout.max_prompt_len=12"]
    assert main(["inspect", path, *words]) == 0
    out = capsys.readouterr().out
    assert "<|user|>1+1=<|assistant|>" in out and "length of prompts in tokens: shortest 6" in out
    assert "1 longer than rollout.max_prompt_len; the first one: row 2" in out
    assert main(["inspect", path, *words, "--json", "--rows=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_rows"] == 2 and found["num_read"] == 1
    assert [each["text"] for each in found["examples"]] == ["<|user|>1+1=<|assistant|>"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"input": "1", "n": 1.0}, {"input": "2", "n": true}]'),
        ("a.json", '{"data": [{"input": "1", "n": 1.0}, {"input": "2", "n": true}], "version": 1}'),
        ("pretty.jsonl", '{\n  "input": "1",\n  "n": 1.0\n}\n{\n  "input": "2",\n  "n": true\n}\n'),
    ],
)
def test_json_is_converted(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / name, tmp_path / "rows.jsonl"
    source.write_text(content)
    assert main(["inspect", str(source)]) == (2 if name.endswith(".json") else 0)
    assert "rlscale-data convert" in "".join(capsys.readouterr())
    assert main(["convert", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: 2 rows\n"
    assert target.read_text() == '{"input": "1", "n": 1.0}\n{"input": "2", "n": true}\n'


def test_csv_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "a.csv", tmp_path / "a.jsonl"
    source.write_text('input,label\n"a, ""b""\nc",1\n', encoding="utf-8-sig")
    assert main(["convert", str(source), str(target)]) == 0
    assert json.loads(target.read_text()) == {"input": 'a, "b"\nc', "label": "1"}
    assert main(["convert", str(source), str(target)]) == 2
    source.write_text("input,label\n1\n")
    assert main(["convert", str(source), str(tmp_path / "b.jsonl")]) == 2
    err = capsys.readouterr().err
    assert f"{target} must be a new file, got one that exists" in err
    assert "row 2 has another number of fields" in err and [*tmp_path.glob("b*")] == []
    source.write_text("input,label,label\n1,2,3\n")
    assert main(["convert", str(source), str(tmp_path / "b.jsonl")]) == 2
    assert f"{source} must have each column once, got 'label' twice; rename one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "rlscale-data must be inspect <file>, convert <file> <new file>, or download <name>, got nothing"),
        (["inspect"], "rlscale-data inspect must have a file, got nothing"),
        (["inspect", "--rows", "none"], "--rows must be a number of rows above 0, got none; e.g. --rows 1000"),
        (["inspect", "gone.jsonl"], "rlscale-data: gone.jsonl must be a file, got nothing at "),
        (
            ["convert", "a.csv", "a.csv/b.jsonl"],
            "a.csv/b.jsonl must be in a folder that exists, got none; create it first",
        ),
        (
            ["inspect", "a.csv", "data.prompt_data=b"],
            "data.prompt_data must not be set here, got data.prompt_data; name",
        ),
        (["convert", "a.csv", "--into"], "rlscale-data convert must have no flags, got --into; write ./ in front of"),
        (
            ["download", "gsm8k", "--into", "a.csv", "--endpoint", "http://127.0.0.1:1"],
            "a.csv/gsm8k must be a folder to write to, got Not a directory; name another folder with --into",
        ),
        (
            ["download", "gsm8k", "--out", "a"],
            "rlscale-data download must have no flags but --into and --endpoint, got --out; see rlscale-data --help",
        ),
        (["convert", "gone.json", "new.jsonl"], "rlscale-data: gone.json must be a file, got nothing at "),
    ],
)
def test_wrong_input_is_one_message(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("a,b\n1,2\n")
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert main(["--help"]) == main(["--version"]) == 0
    usage = capsys.readouterr().out
    assert "usage: rlscale-data inspect <file>" in usage and f"download <{'|'.join(DATASETS)}>" in usage
