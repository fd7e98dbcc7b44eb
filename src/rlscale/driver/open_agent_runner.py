"""Agents that know a URL, as the config describes them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlscale.agents.agent_runner import Agent, AgentLimits, AgentRunner
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_child import CUSTOM
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_function import FunctionAgent, process_agent
from rlscale.agents.run_log import AgentLogs
from rlscale.agents.run_remote import RemoteAgent
from rlscale.config import EngineKind, RunConfig
from rlscale.config.groups.agent import AgentIsolation
from rlscale.config.user_functions import as_dotted
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import EngineError
from rlscale.models.hf_models import load_hf_fields
from rlscale.plugins.load_plugin import load_plugin
from rlscale.protocols import AgentGateway
from rlscale.rollout.engine_pool import EnginePool

log = logging.getLogger(__name__)

AGENT_KEY_VARIABLE = "RLSCALE_AGENT_API_KEY"
"""Environment variable with the key of the server `agent.url`."""

LOG_FOLDER = "agents"
"""Folder of the logs, in the run folder."""

DEFAULT_SLOTS = 256
"""Requests at once of an engine whose number is not in the config."""

MAX_LOCAL_AGENTS, LOCAL_AGENTS_PER_SLOT = 100_000, 4
"""Agents at once that need no process: of a run whose KV cache is known, and for each slot of its engines."""


@asynccontextmanager
async def open_agent_runner(
    prepared: PreparedRun, pool: EnginePool, gateway: AgentGateway, *, folder: Path
) -> AsyncIterator[AgentRunner]:
    """Runs the agents of `agent.function_path`, `agent.command` or `agent.url`.

    Args:
        folder: of the run.
    """
    config = prepared.config
    agent = build_agent(config)
    admission = await open_admission(config, pool)
    limits = AgentLimits(
        timeout_s=config.agent.timeout_s,
        max_turns=config.agent.max_turns,
        max_context_len=load_hf_fields(prepared.model_path).get("max_position_embeddings"),
    )
    logs = AgentLogs(folder / LOG_FOLDER, keep=config.agent.keep_logs, max_bytes=config.agent.max_log_bytes)
    try:
        yield AgentRunner(gateway, agent, limits, logs=logs, admission=admission)
    finally:
        if isinstance(agent, RemoteAgent):
            await agent.close()


async def open_admission(config: RunConfig, pool: EnginePool, *, is_local: bool = False) -> AgentAdmission:
    """Admits agents while their conversations fit the KV cache of the engines.

    Args:
        is_local: an agent costs no process, so that only the cache limits their number, if its size is known.
    """
    cache_tokens = await _cache_tokens(pool)
    limit = _num_slots(config) * len(pool.present)
    if is_local:
        # Many of them wait for tools, and not for the engines.
        limit = MAX_LOCAL_AGENTS if cache_tokens is not None else LOCAL_AGENTS_PER_SLOT * limit
    return AgentAdmission(
        config.agent.max_concurrent or limit,
        cache_tokens=cache_tokens,
        first_tokens=config.rollout.max_response_len,
    )


def build_agent(config: RunConfig) -> Agent:
    """The agent of the config.

    Raises:
        ConfigError: its function cannot be imported.
    """
    agent, key = config.agent, "agent.function_path"
    if agent.url is not None:
        return RemoteAgent(agent.url, timeout_s=agent.timeout_s, api_key=os.environ.get(AGENT_KEY_VARIABLE))
    if agent.command is not None:
        errors = tuple(agent.policy_errors)
        return CommandAgent(command=agent.command, env=agent.env, pass_env=agent.pass_env, policy_errors=errors)
    assert agent.function_path is not None, "the condition says so"
    if agent.isolation == AgentIsolation.process:
        env = {**agent.env, CUSTOM: json.dumps(config.custom)}
        errors = tuple(agent.policy_errors)
        return process_agent(as_dotted(agent.function_path), env=env, pass_env=agent.pass_env, policy_errors=errors)
    function = load_plugin(key, agent.function_path, args=None, custom=config.custom)
    return FunctionAgent(function, policy_errors=agent.policy_errors)


def _num_slots(config: RunConfig) -> int:
    """Requests that one engine answers at once."""
    if config.rollout.engine == EngineKind.embedded:
        return config.rollout.num_slots
    number = config.sglang.server_args.get("max_running_requests")
    return number if isinstance(number, int) and number > 0 else DEFAULT_SLOTS


async def _cache_tokens(pool: EnginePool) -> int | None:
    """Tokens that fit the KV cache of all engines; None: they do not say."""
    total = 0
    for engine in pool.present:
        try:
            info: dict[str, Any] = await engine.info()
        except EngineError as error:
            log.info("the size of the KV cache is not known: %s", error)
            return None
        number = info.get("max_total_num_tokens")
        if not isinstance(number, int):
            return None
        total += number
    return total or None
