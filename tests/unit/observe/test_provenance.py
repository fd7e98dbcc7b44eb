"""What is recorded about a run, and that no secret is."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from rlscale.observe.provenance import (
    REDACTED,
    git_state,
    is_secret,
    redact_override,
    redact_yaml,
    write_provenance,
)


@pytest.mark.parametrize(
    "name",
    [
        "logging.wandb.key",
        "rollout.router_api_key",
        "custom.hf_token",
        "token",
        "db.password",
        "secret",
        "aws_secret_value",
        "reward.auth_token",
        "wandb_key",
        "apikey",
        "Authorization",
    ],
)
def test_secrets_are_recognised(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "data.input_key",
        "data.label_key",
        "data.metadata_key",
        "rollout.stop_token_ids",
        "train.max_tokens_per_gpu",
        "throughput.tokens_per_s",
        "model.eos_token",
        "model.tokenizer",
        "algo.calculate_per_token_loss",
        "",
    ],
)
def test_names_of_columns_and_tokens_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("algo.eps_clip=0.1", "algo.eps_clip=0.1"),
        ("data.input_key=question", "data.input_key=question"),
        ("logging.wandb.key=abc123", f"logging.wandb.key={REDACTED}"),
        ("++custom={api_key: abc123, n: 2}", f"++custom={{api_key: {REDACTED}, n: 2}}"),
        ("++custom={hf_token: 'abc 123, x', n: 2}", f"++custom={{hf_token: {REDACTED}, n: 2}}"),
        ("++custom={api_key: ${oc.env:MINE}, n: 2}", f"++custom={{api_key: {REDACTED}, n: 2}}"),
        ("++custom={headers: {Authorization: Bearer abc123}}", f"++custom={{headers: {{Authorization: {REDACTED}}}}}"),
        ("++custom={key: {input: question}}", "++custom={key: {input: question}}"),
        ("reward.url=http://me:abc123@host/x", f"reward.url=http://{REDACTED}@host/x"),
        ("+experiment=quickstart", "+experiment=quickstart"),
        ("~logging.wandb", "~logging.wandb"),
    ],
)
def test_overrides_keep_all_but_secrets(typed: str, kept: str) -> None:
    assert redact_override(typed) == kept


def test_yaml_without_secrets_is_kept_to_the_letter() -> None:
    text = "data:\n  input_key: question  # a column\nrollout:\n  stop_token_ids: [1, 2]\n"
    assert redact_yaml(text) == text


def test_yaml_with_secrets_loses_only_them() -> None:
    text = "b: 1\nlogging: {wandb: {key: abc123, project: p}}\nservers: [{api_key: abc123, port: 1}]\nhf_token: null\n"
    redacted = redact_yaml(text)
    assert "abc123" not in redacted
    assert yaml.safe_load(redacted) == {
        "b": 1,
        "logging": {"wandb": {"key": REDACTED, "project": "p"}},
        "servers": [{"api_key": REDACTED, "port": 1}],
        "hf_token": None,
    }


def test_secrets_inside_of_command_lines_are_left_out() -> None:
    text = "run: {name: key=abc123, overrides: [algo.eps_clip=0.1, logging.wandb.key=abc123]}\n"
    assert yaml.safe_load(redact_yaml(text))["run"] == {
        "name": "key=abc123",
        "overrides": ["algo.eps_clip=0.1", f"logging.wandb.key={REDACTED}"],
    }


def test_a_run_folder_says_what_was_run(tmp_path: Path) -> None:
    write_provenance(tmp_path / "run", config_yaml="algo:\n  eps_clip: 0.1\n", overrides=["algo.eps_clip=0.1"])
    assert (tmp_path / "run" / "config.yaml").read_text() == "algo:\n  eps_clip: 0.1\n"
    (entry,) = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert entry["overrides"] == ["algo.eps_clip=0.1"]
    assert entry["versions"]["python"] == platform.python_version()
    assert entry["versions"]["torch"] == version("torch")
    assert entry["host"]["name"] == platform.node()
    assert set(entry) == {"time", "command", "overrides", "versions", "git", "host", "process"}


def test_a_resumed_run_keeps_the_earlier_entries(tmp_path: Path) -> None:
    for overrides in (["a=1"], ["b=2"]):
        write_provenance(tmp_path, config_yaml="a: 1\n", overrides=overrides)
    entries = json.loads((tmp_path / "provenance.json").read_text())
    assert [entry["overrides"] for entry in entries] == [["a=1"], ["b=2"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "provenance.json"]


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    (tmp_path / ".gitignore").write_text("env/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert state["commit"] == git(tmp_path, "rev-parse", "HEAD").strip()
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True


def test_an_environment_inside_a_checkout_is_not_its_code(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("env/\n")
    (tmp_path / "env" / "rlscale").mkdir(parents=True)
    assert git_state(tmp_path / "env" / "rlscale") is None


def test_without_git_the_state_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
