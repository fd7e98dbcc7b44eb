"""Tools of the config: loads what `agent.tools` names, and checks it."""

import asyncio
from collections.abc import Sequence

from rlscale.agents.tool import Tool, ToolDefinitionError
from rlscale.config.user_functions import import_path
from rlscale.errors import ConfigError, Problem
from rlscale.renderers.renderer import ToolSpec

KEY, SERVERS = "agent.tools", "agent.mcp_servers"


def load_tools(paths: Sequence[str]) -> list[Tool]:
    """The tools that paths name, checked.

    Raises:
        ConfigError: a path cannot be imported or names no tool, a function cannot be one, or two have the same name.
    """
    problems: list[Problem] = []
    found: dict[str, Tool] = {}
    for index, path in enumerate(paths):
        key = f"{KEY}.{index}"
        try:
            # User code runs here for the first time.
            named = import_path(path, key=key)
        except ConfigError as error:
            problems += error.problems
            continue
        tools = list(named) if isinstance(named, list | tuple) else [named]
        if not tools or not all(isinstance(each, Tool) for each in tools):
            got = f"a value of type {type(named).__name__}" if tools == [named] else "other values in its list"
            fix = f"it is {got}; write @rlscale.agents.tool above the function"
            problems.append(Problem(path=key, rule="be a tool or a list of tools", value=path, fix=fix))
            continue
        for tool in tools:
            problem = _problem(tool, key=key, path=path, known=found)
            if problem is None:
                found[tool.name] = tool
            else:
                problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _problem(tool: Tool, *, key: str, path: str, known: dict[str, Tool]) -> Problem | None:
    if tool.name in known:
        rule, fix = f"have tools with different names, {tool.name} is there twice", "remove one, or set @tool(name=...)"
        return Problem(path=key, rule=rule, value=path, fix=fix)
    try:
        assert tool.spec
    except ToolDefinitionError as error:
        return Problem(path=key, rule=error.rule, value=path, fix=f"the function {tool.name} has {error.found}")
    return None


def check_tool_images(tools: Sequence[Tool], *, reads_images: bool) -> list[Problem]:
    """Problem of tools that take images of rows, in a run that reads none."""
    names = [tool.name for tool in tools if tool.image_parameters]
    if not names or reads_images:
        return []
    rule = f"be set with tools that take images of the row ({', '.join(names)})"
    fix = "set it to the field of the rows that has them, e.g. data.multimodal_keys={image: images}"
    return [Problem(path="data.multimodal_keys", rule=rule, value="null", fix=fix)]


async def load_servers(servers: Sequence[str], *, timeout_s: float) -> list[list[ToolSpec]]:
    """The tools of each MCP server, which are started or asked at the same time.

    Raises:
        ConfigError: a server does not list its tools; all such servers.
    """
    # Imported here: an extra installs the library, which takes half a second.
    from rlscale.agents.mcp_tools import list_tools

    calls = [list_tools(each, key=f"{SERVERS}.{i}", timeout_s=timeout_s) for i, each in enumerate(servers)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    problems = [problem for each in found if isinstance(each, ConfigError) for problem in each.problems]
    if problems:
        raise ConfigError(problems)
    # Anything else is an error of rlscale.
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]


def check_server_names(tools: Sequence[Tool], servers: Sequence[Sequence[ToolSpec]]) -> list[Problem]:
    """Problems of tools of servers whose names are those of other tools."""
    known, problems = {tool.name for tool in tools}, list[Problem]()
    for index, specs in enumerate(servers):
        for name in (spec["function"]["name"] for spec in specs):
            if name in known:
                rule, fix = "have tools with different names than the others", "rename it, or remove one of the two"
                problems.append(Problem(path=f"{SERVERS}.{index}", rule=rule, value=name, fix=fix))
            known.add(name)
    return problems
