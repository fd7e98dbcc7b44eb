"""Scripts: functions and files of answers."""

from pathlib import Path

import pytest

from rlscale.engines.scripted.script import FileScript, ScriptRequest, ScriptRow, load_script
from rlscale.errors import ConfigError

REQUEST = ScriptRequest(rid="r", index=0, seed=7, temperature=1.0, max_new_tokens=8, input_ids=(3, 4))


def answer(text: str, request: ScriptRequest) -> str:
    return f"{text}{request.seed}"


async def waits(text: str, request: ScriptRequest) -> str:
    return text


def one_argument(text: str) -> str:
    return text


def write(folder: Path, text: str) -> str:
    (folder / "answers.jsonl").write_text(text)
    return str(folder / "answers.jsonl")


def test_a_function_is_imported() -> None:
    assert load_script(f"{__name__}:answer")("a", REQUEST) == "a7"


def test_the_answers_of_a_row_are_those_of_its_turns(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "12+30=", "answers": ["call", "42"]}\n\n{"answers": ["other"]}\n')
    script = load_script(path)
    assert script("<u>12+30=<a>", REQUEST) == "call"
    assert script("<u>12+30=<a>call<t>42, said the tool<a>", REQUEST) == "42"
    assert script("<u>12+30=<a>call<t>42<a>42<u>again<a>", REQUEST) == "42"
    assert script("<u>1+1=<a>", REQUEST) == "other"


def test_a_text_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row of the script answers '1\\+1='"):
        FileScript([ScriptRow(prompt="2", answers=("x",))])("1+1=", REQUEST)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "must have a row, got the empty file"),
        ("{", "must have rows with answers, got row 1 of"),
        ('{"answers": ["a"]}\n{"answers": []}', "row 2 of .* answers must be a list of texts"),
        ('{"answers": [1]}', "answers must be a list of texts"),
        ('{"prompt": 1, "answers": ["a"]}', "prompt must be a text"),
        ('{"answer": "a"}', "it must be an object with prompt and answers"),
    ],
)
def test_wrong_rows_are_named(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        load_script(write(tmp_path, text))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes('{"answers": ["é"]}'.encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"rollout\.script_path must be a file that can be read as UTF-8, got .*answers"
    ):
        load_script(str(path))


def test_a_text_may_contain_line_separators(tmp_path: Path) -> None:
    assert load_script(write(tmp_path, '{"answers": ["a\u2028b"]}'))("text", REQUEST) == "a\u2028b"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (
            "no_such_module:answer",
            "rollout.script_path must name a function .* got no_such_module:answer; ModuleNotFound",
        ),
        (f"{__name__}:missing", "AttributeError"),
        (f"{__name__}:waits", "must name a plain function"),
        (f"{__name__}:one_argument", "must name a function of \\(text, request\\)"),
        ("missing.jsonl", "must name an existing file"),
    ],
)
def test_wrong_paths_are_named(path: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_script(path)
