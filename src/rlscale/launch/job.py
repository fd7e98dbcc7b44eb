"""A job, independent of its scheduler: the command of the run, its nodes, and its environment."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rlscale.config import RunConfig
from rlscale.errors import Problem
from rlscale.launch.node_needs import NodeNeeds
from rlscale.secrets import REDACTED, replace_secrets

MAX_NAME = 40
RAY_ADDRESS = "cluster.ray_address"
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One run as a job."""

    name: str
    overrides: tuple[str, ...]  # as typed
    run_dir: str  # the same for every start of the job, so that a restarted job resumes
    needs: NodeNeeds
    actors: str  # `8 trainer ranks, 8 engines`
    restarts_nodes: bool  # `fault_tolerance`: the run survives the loss of a node
    config_dir: str | None = None
    env: tuple[str, ...] = ()  # names of variables that the job needs
    written_by: str = ""  # the command that wrote the file, and its version

    @property
    def train_command(self) -> tuple[str, ...]:
        """The command of the driver. Ray's address is in RAY_ADDRESS, so that the config of every start is the same."""
        folder = () if self.config_dir is None else ("--config-dir", self.config_dir)
        added = (f"run.dir={hydra_string(self.run_dir)}", f"{RAY_ADDRESS}=auto")
        return ("rlscale-train", *folder, *self.overrides, *added)

    @property
    def comment(self) -> str:
        """Comment lines with the origin and the size of the job."""
        lines = (
            self.written_by,
            f"{self.needs.text}: {self.actors}",
        )
        return "".join(f"# {one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """A text in which no character ends a comment line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def hydra_string(text: str) -> str:
    """A value of an override, quoted for Hydra where needed."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def shell_words(words: Sequence[str], *, indent: str = "  ") -> str:
    """A command, quoted for a shell, one argument per line."""
    return f" \\\n{indent}".join(shlex.quote(word) for word in words)


def default_name(config: RunConfig) -> str:
    """`rlscale-qwen3-4b-grpo-1a2b3c4d`, a name that every scheduler accepts."""
    plain = re.sub(r"[^a-z0-9]+", "-", (config.run.name or "run").lower()).strip("-")
    return f"rlscale-{plain}"[:MAX_NAME].strip("-")


def absolute_run_dir(config: RunConfig, folder: str) -> str:
    """The run folder, below `folder` unless it is absolute."""
    assert config.run.dir is not None, "set by the resolve step"
    return posixpath.join(folder, config.run.dir)


def check_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Problems of overrides that a job cannot have: an address of Ray, and secrets, which would be in the file."""
    found = []
    for override in overrides:
        name, _, value = override.partition("=")
        key = name.lstrip("+~")
        if key == RAY_ADDRESS:
            fix = "remove it: the job starts Ray on its nodes and connects to it"
            found.append(Problem(path=RAY_ADDRESS, rule="not be given to a job", value=value, fix=fix))
        elif _has_secret(override):
            variable = re.sub(r"\W", "_", key).upper()
            fix = f"set the environment variable {variable} and write '${{oc.env:{variable}}}' for the secret"
            problem = Problem(path=key, rule="not hold a secret, which the file would contain", value=REDACTED, fix=fix)
            found.append(problem)
    return found


def variables_of(overrides: Sequence[str]) -> tuple[str, ...]:
    """Names of the environment variables that overrides refer to."""
    return tuple(dict.fromkeys(name for override in overrides for name in _REFERENCE.findall(override)))


def _has_secret(override: str) -> bool:
    secrets: list[str] = []

    def collect(value: str) -> str:
        secrets.append(value)
        return value

    replace_secrets(override, collect)
    return any("${" not in secret and secret.strip("'\" ") not in ("", "null") for secret in secrets)
