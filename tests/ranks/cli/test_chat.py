"""The command `rlscale-chat` as a process: pipes, a terminal, Ctrl-C, wrong arguments."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.config import load_config, to_yaml
from rlscale.models.resolve_model import resolve_model

COMMAND = [sys.executable, "-m", "rlscale.cli.chat"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a small model with a chat template; its weights are random."""
    folder = tmp_path_factory.mktemp("run")
    overrides = ["model=tiny_qwen3_agent", "data.apply_chat_template=true", "rollout.max_response_len=24"]
    config = load_config([*overrides, f"model.cache_dir={folder / 'cache'}"])
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "finished.json").write_text(json.dumps({}))
    (folder / "hf").symlink_to(resolve_model(config.model))
    return folder


def chat(*arguments: str, given: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *arguments], input=given, capture_output=True, text=True, timeout=200, check=False)


def test_a_pipe_gets_an_answer_to_each_line(run: Path) -> None:
    done = chat(str(run), "--temperature", "0", given="1+2=\n/reset\n/system brief\n/nope\n\n1+2=\n/quit\nnever")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == done.stderr.count("cut after 24 tokens") + 3, done.stderr
    assert "all messages are forgotten\nthe system message is set\n/nope is no command; /help lists them" in done.stderr
    assert "\033" not in done.stdout + done.stderr
    again = chat(str(run), "--temperature", "0", given="1+2=")
    assert again.stdout and done.stdout.startswith(again.stdout)


@pytest.mark.nightly
def test_the_limit_of_an_answer_is_that_of_the_run_or_of_the_command(run: Path) -> None:
    for arguments, limit in (((), 24), (("--max-tokens", "3"), 3)):
        done = chat(str(run), *arguments, given="1+2=")
        assert f"cut after {limit} tokens" in done.stderr or len(done.stdout) <= limit


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "SOURCE must be given, got nothing"),
        (["/gone/folder"], "SOURCE must name an existing folder or a hub id, got"),
        (["/"], "SOURCE must be a run, a checkpoint or a model, got /"),
        (["x", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0; remove it"),
        (["x", "--temperature", "-1"], "--temperature must be at least 0, got -1.0; write e.g. 0.7"),
        (["x", "--max-tokens", "many"], "--max-tokens must be an integer, got many"),
        (["x", "--tools"], "--tools must be a known argument"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], text: str) -> None:
    done = chat(*arguments, given="")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"rlscale-chat: {text}"), done.stderr


def test_ctrl_c_ends_a_wait_for_input_without_a_traceback(run: Path) -> None:
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([*COMMAND, str(run)], start_new_session=True, **streams) as process:
        os.close(theirs)
        shown = b""
        while b"> " not in shown:
            shown += os.read(ours, 4096)
        assert b"tools: none" in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        rest = b""
        try:
            while part := os.read(ours, 4096):
                rest += part
        except OSError:  # the terminal has closed
            pass
    os.close(ours)
    assert b"Traceback" not in rest and b"Fatal" not in rest
