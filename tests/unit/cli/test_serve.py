"""The command `rlscale-serve`."""

from pathlib import Path
from typing import Any

import pytest

from rlscale.cli import buffer, convert, crashtest, serve, serve_script
from rlscale.cli.serve import main, make_parser
from rlscale.engines.launch import API_KEY_VARIABLE
from tests.weight_files import write_no_weights


@pytest.mark.parametrize("key", [None, ""], ids=["unset", "empty"])
def test_other_machines_need_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
    assert main(["--model-path", "/no/model", "--host", "0.0.0.0"]) == 2
    assert f"set {API_KEY_VARIABLE}" in caplog.text
    monkeypatch.setattr(serve_script, "die_with_parent", lambda: None)  # it would tie this process to its parent
    script = ["--script", "/no/script", "--model-path", "/no/model", "--port", "0", "--host", "0.0.0.0"]
    caplog.clear()
    assert serve_script.main(script) == 2
    assert f"a loopback address without {API_KEY_VARIABLE}" in caplog.text


def test_defaults() -> None:
    args = make_parser().parse_args(["--model-path", "m"])
    assert (args.host, args.deterministic, args.dtype) == ("127.0.0.1", True, "float32")
    assert make_parser().parse_args(["--model-path", "m", "--no-deterministic"]).deterministic is False


@pytest.mark.parametrize("command", [serve, buffer, convert, crashtest])
def test_the_help_shows_defaults_that_are_values(command: Any) -> None:
    text = " ".join(command.make_parser().format_help().split())
    assert "(default: " in text and "(default: None)" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--model-path", "/nope"],
            "--model-path must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        ),
        (
            ["--model-path", "{empty}"],
            "--model-path must be a Hugging Face checkpoint, got '{empty}'; it has no config.json; give a folder "
            "written by save_pretrained",
        ),
        (
            ["--model-path", "{broken}"],
            "--model-path must be a complete checkpoint, got {broken}; KeyError: 'num_attention_heads'",
        ),
        (
            ["--model-path", "{cut}"],
            "--model-path must be a folder with complete weights, got '{cut}'; model.safetensors is cut off, or no "
            "safetensors file: it has 1 bytes; download or copy it again",
        ),
        (
            ["--model-path", "{broken}", "--num-slots", "0"],
            "--num-slots must be at least 1, got 0; remove it to use the default",
        ),
        (
            ["--model-path", "{broken}", "--device", "banana"],
            "--device must be auto, cpu, cuda or cuda:<index>, got banana",
        ),
    ],
)
def test_each_wrong_argument_is_one_line(
    words: list[str], expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty, broken, cut = tmp_path / "empty", tmp_path / "broken", tmp_path / "cut"
    for folder in (empty, broken, cut):
        folder.mkdir()
    for folder in (broken, cut):
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (cut / "model.safetensors").write_bytes(b"?")
    write_no_weights(broken / "model.safetensors")
    named = {"empty": str(empty), "broken": str(broken), "cut": str(cut)}
    assert main([word.format(**named) for word in words]) == 2
    (record,) = caplog.records
    assert record.getMessage() == expected.format(**named)
