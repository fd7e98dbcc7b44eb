"""Checks of the agent of a run: its tools can be imported, its servers list theirs, and its command exists."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlscale.config import RunConfig
from rlscale.config.installed import is_installed
from rlscale.config.problems import show
from rlscale.config.rules import has_tools, uses_engines
from rlscale.errors import ConfigError, Problem


def check_agent(config: RunConfig) -> list[Problem]:
    """Problems of `agent.tools`, `agent.mcp_servers` and `agent.command`. Starts servers that are commands, and ends
    them again.
    """
    agent = config.agent
    if not uses_engines(config):
        return []
    if agent.command is not None:
        return _check_command(agent.command)
    return _check_tools(config) if has_tools(config) else []


def _check_tools(config: RunConfig) -> list[Problem]:
    # Imported here: tools need numpy, which a run without them must not wait for.
    from rlscale.agents.load_tools import check_server_names, check_tool_images, load_servers, load_tools
    from rlscale.agents.tool import Tool

    agent, problems, tools = config.agent, list[Problem](), list[Tool]()
    try:
        tools = load_tools(agent.tools or [])
        problems += check_tool_images(tools, reads_images=config.data.multimodal_keys is not None)
    except ConfigError as error:
        problems += error.problems
    if not agent.mcp_servers or not is_installed("mcp"):  # `check_packages` reports the missing package
        return problems
    try:
        servers = asyncio.run(load_servers(agent.mcp_servers, timeout_s=agent.tool_timeout_s))
    except ConfigError as error:
        return [*problems, *error.problems]
    return problems + check_server_names(tools, servers)


def _check_command(command: Sequence[str]) -> list[Problem]:
    program, arguments = command[0], command[1:]
    if program != "python" and shutil.which(program) is None:
        words = program.split()
        fix = "install the program, or write its full path"
        if len(words) > 1:
            fix = f"write each word as an entry, agent.command={show([*words, *arguments])}"
        return [Problem(path="agent.command.0", rule="be a program that can be executed", value=program, fix=fix)]
    # The script of an interpreter: each attempt at each trajectory would end with the same error.
    script = arguments[0] if arguments and Path(program).name.startswith("python") else ""
    if script.endswith(".py") and not os.path.isfile(script):
        fix = f"check the name, which is relative to {os.getcwd()}"
        return [Problem(path="agent.command.1", rule="be an existing file", value=script, fix=fix)]
    return []
