"""Rules about trajectories of several turns."""

from __future__ import annotations

import re
import shlex
from operator import attrgetter

from rlscale.config.addresses import is_plain_url, is_url, public_url
from rlscale.config.groups.agent import AgentIsolation, McpSessions, OnToolError
from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules.conditions import is_sft, reads_buffer, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

GENERATORS: tuple[tuple[str, ...], ...] = (
    ("agent.tools", "agent.mcp_servers"),
    ("agent.environment_path",),
    ("agent.function_path",),
    ("agent.command",),
    ("agent.url",),
    ("sampling.custom_generate_function_path",),
)
"""Keys that each say how a trajectory is generated; those of one entry belong together."""

TOOL_KEYS = ("agent.max_tool_chars", "agent.on_tool_error", "agent.tool_processes", "agent.tool_timeout_s")


def has_tools(config: RunConfig) -> bool:
    """Whether the policy calls tools."""
    return config.agent.tools is not None or config.agent.mcp_servers is not None


def has_environment(config: RunConfig) -> bool:
    """Whether the policy acts in an environment."""
    return config.agent.environment_path is not None


def runs_agents(config: RunConfig) -> bool:
    """Whether agents that know a URL generate the trajectories."""
    agent = config.agent
    return agent.function_path is not None or agent.command is not None or agent.url is not None


def has_agent(config: RunConfig) -> bool:
    """Whether agents generate the trajectories: by tools, in an environment, or by a URL."""
    return has_tools(config) or has_environment(config) or runs_agents(config)


def _has_agent_processes(config: RunConfig) -> bool:
    agent = config.agent
    return agent.command is not None or (agent.function_path is not None and agent.isolation == AgentIsolation.process)


@rule
def tools_are_dotted_paths(config: RunConfig) -> list[Problem]:
    fix = "write package.module:name, e.g. my_tools:add"
    return [
        Problem(path=f"agent.tools.{number}", rule="be a dotted path", value=show(path), fix=fix)
        for number, path in enumerate(config.agent.tools or ())
        if not re.match(DOTTED_PATH, path)
    ]


@rule
def one_key_generates_trajectories(config: RunConfig) -> list[Problem]:
    given = [names for names in GENERATORS if any(attrgetter(name)(config) is not None for name in names)]
    if len(given) < 2:
        return []
    first, path = (next(name for name in names if attrgetter(name)(config) is not None) for names in given[:2])
    alternatives = (
        " ".join(f"{name}=null" for name in names if attrgetter(name)(config) is not None) for names in given
    )
    fix = f"keep one of them: set {' or '.join(alternatives)}"
    return [Problem(path=path, rule=f"be null with {first}", value=show(attrgetter(path)(config)), fix=fix)]


@rule
def agent_url_is_a_url(config: RunConfig) -> list[Problem]:
    url = config.agent.url
    if url is None or is_plain_url(url):
        return []
    rule, fix = "be http://<host>:<port>/<path> or https://<host>/<path>", "write e.g. http://10.0.0.1:9000/run"
    return [Problem(path="agent.url", rule=rule, value=public_url(url), fix=fix)]


@rule
def agents_that_start_again_have_no_rounds(config: RunConfig) -> list[Problem]:
    """Such an agent starts again after a round, so that no trajectory longer than one would end."""
    tokens, agent = config.sampling.round_tokens, config.agent
    if tokens is None or not has_agent(config) or not config.sampling.partial_rollout:
        return []
    keeps_state = config.sandbox.kind is not None or agent.mcp_sessions == McpSessions.trajectory
    if has_tools(config) and not keeps_state:
        return []
    fix = "remove it; an aborted trajectory of such an agent starts again"
    rule = "be null with an agent whose state outlives a call: an environment, an agent by URL, a tool with a sandbox"
    return [Problem(path="sampling.round_tokens", rule=rule, value=str(tokens), fix=fix)]


@rule
def mcp_servers_are_urls_or_commands(config: RunConfig) -> list[Problem]:
    fix = "write http://<host>:<port>/mcp, or a command such as 'python my_server.py'"
    return [
        Problem(
            path=f"agent.mcp_servers.{number}", rule="be a URL or a command", value=show(public_url(server)), fix=fix
        )
        for number, server in enumerate(config.agent.mcp_servers or ())
        if not _is_server(server)
    ]


def _is_server(text: str) -> bool:
    """Whether a text is a URL, or a command that a shell would split into words."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        return False
    return bool(words) and ("://" not in words[0] or is_url(text))


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("agent",),
        when=lambda config: not uses_engines(config) or is_sft(config) or reads_buffer(config),
        why="the run does not generate its trajectories",
    ),
    IgnoredKey(
        names=("agent.tool_retries",),
        when=lambda config: has_tools(config) and config.agent.on_tool_error != OnToolError.retry,
        why="agent.on_tool_error is not retry",
    ),
    IgnoredKey(
        names=("agent.mcp_sessions",),
        when=lambda config: config.agent.mcp_servers is None,
        why="agent.mcp_servers is not set",
    ),
    IgnoredKey(
        names=("agent.tool_processes",),
        when=lambda config: config.agent.tools is None,
        why="agent.tools is not set",
    ),
    IgnoredKey(
        names=(*TOOL_KEYS, "agent.tool_retries"),
        when=lambda config: not has_tools(config) and not has_environment(config),
        why="neither agent.tools nor agent.mcp_servers is set",
    ),
    IgnoredKey(
        names=("agent.on_tool_error", "agent.tool_retries", "agent.tool_timeout_s"),
        when=lambda config: not has_tools(config),
        why="neither agent.tools nor agent.mcp_servers is set",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("agent.environment_")),
        when=lambda config: not has_environment(config),
        why="agent.environment_path is not set",
    ),
    IgnoredKey(
        names=("agent.max_concurrent", "agent.max_turns", "agent.timeout_s"),
        when=lambda config: not has_agent(config),
        why="no agent is set",
    ),
    IgnoredKey(
        names=("agent.max_log_bytes",),
        when=lambda config: not runs_agents(config),
        why="none of agent.function_path, agent.command and agent.url is set",
    ),
    IgnoredKey(
        names=("agent.keep_logs",),
        when=lambda config: not runs_agents(config) and not has_environment(config),
        why="neither an environment nor an agent by function, command or URL is set",
    ),
    IgnoredKey(
        names=("agent.isolation",),
        when=lambda config: config.agent.function_path is None,
        why="agent.function_path is not set",
    ),
    IgnoredKey(
        names=("agent.policy_errors",),
        when=lambda config: config.agent.function_path is None and config.agent.command is None,
        why="neither agent.function_path nor agent.command is set",
    ),
    IgnoredKey(
        names=("agent.env", "agent.pass_env"),
        when=lambda config: not _has_agent_processes(config),
        why="no agent runs in a process",
    ),
)
