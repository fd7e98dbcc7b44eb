"""What exactly was run: the config, the overrides, the versions, the state of the code, the machine.

Written into the run folder before anything starts. Values of settings that look like secrets are left out.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
PACKAGES = ("rlscale", "torch", "transformers", "ray", "hydra-core", "numpy")
REDACTED = "<redacted>"

_ALWAYS_SECRET = frozenset(
    {"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey", "authorization"}
)
_KEY_OWNERS = frozenset({"api", "access", "auth", "private", "wandb", "ssh"})
_TOKEN_OF_TEXT = frozenset({"eos", "bos", "pad", "unk", "sep", "mask", "stop", "end", "per"})
_INNER_VALUE = re.compile(
    r"""([\w.]+)(\s*[:=]\s*)(\$\{[^}]*\}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\s,{}\[\]\\"'])(?:\\.|[^,{}\[\]\\"'])*)"""
)
"""Name, separator and value inside of a mapping in Hydra's grammar; a value may be quoted, refer, or hold spaces."""
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)")
_GIT_TIMEOUT_S = 5.0


def write_provenance(folder: Path, *, config_yaml: str, overrides: Sequence[str] = ()) -> None:
    """Writes `config.yaml` and appends one entry to the list in `provenance.json`: a resumed run has several.

    Args:
        config_yaml: the resolved config.
        overrides: what the user typed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG_FILE, redact_yaml(config_yaml))
    path = folder / PROVENANCE_FILE
    launches = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    launches.append(collect(overrides))
    _replace(path, json.dumps(launches, indent=2) + "\n")


def collect(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The entry for this moment and this process, as JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": Path(sys.argv[0]).name,
        "overrides": [redact_override(text) for text in overrides],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": {"rlscale": git_state(Path(__file__).parent), "working_directory": git_state(Path.cwd())},
        "host": {"name": platform.node(), "platform": platform.platform(), "num_cpus": os.cpu_count()},
        "process": os.getpid(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds `folder`, and whether files differ from it. None outside of a checkout.

    A folder that git ignores (an environment inside somebody's checkout) is not part of that checkout.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or _git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    status = _git(folder, "status", "--porcelain")
    return {
        "root": root,
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def is_secret(name: str) -> bool:
    """True when a setting of this dotted name holds a secret: a key, a token or a password.

    Names of columns and tokens of text (`data.input_key`, `eos_token`) are none.
    """
    words = re.findall(r"[a-z0-9]+", name.rsplit(".", 1)[-1].lower())
    if not words:
        return False
    *before, last = words
    owner = before[-1] if before else ""
    if last == "key":
        return not before or owner in _KEY_OWNERS
    if last == "token":
        return owner not in _TOKEN_OF_TEXT
    return not _ALWAYS_SECRET.isdisjoint(words)


def redact_override(text: str) -> str:
    """One `name=value` with the value of a secret left out, also inside of a mapping: `custom={api_key: ...}`."""
    return replace_secrets(text, lambda _: REDACTED)


def replace_secrets(text: str, replacement: Callable[[str], str]) -> str:
    """One `name=value` with each secret in it, also the login in a URL, replaced by what `replacement` makes of it.

    Args:
        replacement: gets the value as it stands, with its quotes.
    """
    name, equals, value = text.partition("=")
    if equals and is_secret(name):
        return f"{name}={replacement(value)}"

    def replace(match: re.Match[str]) -> str:
        inner, between, found = match.groups()
        return f"{inner}{between}{replacement(found) if is_secret(inner) else found}"

    kept = name + equals + _INNER_VALUE.sub(replace, value)
    return _URL_LOGIN.sub(lambda match: replacement(match.group()), kept)


def redact_yaml(text: str) -> str:
    """The same YAML with the values of secrets left out; untouched when it holds none."""
    config = yaml.safe_load(text)
    redacted = redact(config)
    return text if redacted == config else yaml.safe_dump(redacted, sort_keys=False)


def redact(value: Any, name: str = "") -> Any:
    """A tree of JSON values with the values of secrets left out, also inside of command lines (`run.overrides`)."""
    if value is not None and is_secret(name):
        return REDACTED
    if isinstance(value, dict):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        is_command = name == "overrides"
        return [redact_override(inner) if is_command and isinstance(inner, str) else redact(inner) for inner in value]
    return _without_login(value) if isinstance(value, str) else value


def _without_login(text: str) -> str:
    return _URL_LOGIN.sub(REDACTED, text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *args: str) -> str | None:
    """Output of a git command; None when it fails, takes too long, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
