"""Rules about sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

from rlscale.config.addresses import is_plain_url, public_url
from rlscale.config.groups.sandbox import SandboxKind
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules.conditions import is_sft, reads_buffer, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def the_python_tool_has_sandboxes(config: RunConfig) -> list[Problem]:
    """It runs nowhere else."""
    kind = config.sandbox.kind
    named = [path for path in config.agent.tools or [] if path.replace(":", ".") == PYTHON_TOOL]
    if not named or kind is not None:
        return []
    rule, fix = f"be set with the tool {named[0]}", "set it to subprocess"
    return [Problem(path="sandbox.kind", rule=rule, value="null", fix=fix)]


PYTHON_TOOL = "rlscale.agents.sandbox_tool.python"
"""The tool that runs programs of the policy."""


@rule
def sandbox_url_fits_the_kind(config: RunConfig) -> list[Problem]:
    kind, url = config.sandbox.kind, config.sandbox.url
    if kind == SandboxKind.fusion and (url is None or not is_plain_url(url)):
        rule = "be http://<host>:<port> or https://<host>:<port> with sandbox.kind=fusion"
        value, fix = "null" if url is None else public_url(url), "write e.g. http://10.0.0.1:8080"
        return [Problem(path="sandbox.url", rule=rule, value=value, fix=fix)]
    if kind == SandboxKind.docker and url is not None and not url.startswith(DAEMON_SCHEMES):
        rule = f"start with one of {', '.join(DAEMON_SCHEMES)} with sandbox.kind=docker"
        fix = "write e.g. unix:///run/docker.sock"
        return [Problem(path="sandbox.url", rule=rule, value=public_url(url), fix=fix)]
    return []


DAEMON_SCHEMES = ("unix://", "tcp://", "ssh://", "http://", "https://")
"""Forms of the address of Docker's daemon that its client knows."""


@rule
def read_only_folders_are_absolute(config: RunConfig) -> list[Problem]:
    """Sandboxes have these folders at the same paths."""
    paths = config.sandbox.read_only_folders
    wrong = [path for path in paths if not Path(path).is_absolute()]
    if not wrong:
        return []
    fixed = [str(Path(path).absolute()) for path in paths]
    rule, fix = "contain absolute paths", f"write {show(fixed)}"
    return [Problem(path="sandbox.read_only_folders", rule=rule, value=show(wrong[0]), fix=fix)]


@rule
def read_only_folders_are_free(config: RunConfig) -> list[Problem]:
    """These folders of a sandbox are not those of the machine."""
    for path in config.sandbox.read_only_folders:
        # Two slashes at the start stay two in normpath.
        found = os.path.normpath(path).replace("//", "/")
        if found in ("/", *RESERVED) or found.startswith(tuple(f"{each}/" for each in RESERVED)):
            rule = f"not contain / or paths in {', '.join(RESERVED)}"
            fix = "remove it, or copy its files into another folder"
            return [Problem(path="sandbox.read_only_folders", rule=rule, value=path, fix=fix)]
    return []


RESERVED = ("/dev", "/proc", "/sandbox", "/sys")
"""Folders that every sandbox has itself."""

IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("sandbox.") and path != "sandbox.kind"),
        when=lambda config: config.sandbox.kind is None,
        why="sandbox.kind is not set",
    ),
    IgnoredKey(
        names=("sandbox.image",),
        when=lambda config: config.sandbox.kind != SandboxKind.docker,
        why="sandbox.kind is not docker",
    ),
    IgnoredKey(
        names=("sandbox.url",),
        when=lambda config: config.sandbox.kind == SandboxKind.subprocess,
        why="sandbox.kind=subprocess uses processes of this machine",
    ),
    IgnoredKey(
        names=("sandbox.read_only_folders",),
        when=lambda config: config.sandbox.kind != SandboxKind.subprocess,
        why="sandbox.kind is not subprocess",
    ),
    IgnoredKey(
        names=("sandbox.memory_mb", "sandbox.max_processes", "sandbox.allow_network"),
        when=lambda config: config.sandbox.kind == SandboxKind.fusion,
        why="the service of sandbox.kind=fusion sets these limits",
    ),
    IgnoredKey(
        names=("sandbox",),
        when=lambda config: is_sft(config) or not uses_engines(config) or reads_buffer(config),
        why="the run generates no trajectories",
    ),
)
