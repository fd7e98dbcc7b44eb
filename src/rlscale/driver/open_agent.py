"""The agent of a run: its tools or environments, from the start of the rollouts to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from rlscale.agents.admitted_agent import AdmittedAgent
from rlscale.agents.environment_agent import EnvironmentAgent
from rlscale.agents.environment_child import EnvironmentSpec
from rlscale.agents.environment_log import EnvironmentLog
from rlscale.agents.environment_pool import EnvironmentPool
from rlscale.agents.load_tools import check_server_names, check_tool_images, load_servers, load_tools
from rlscale.agents.sandbox_tool import SandboxTools, needs_sandbox
from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_pool import FunctionTools, ToolBox, ToolCaller
from rlscale.config.groups.agent import AgentConfig
from rlscale.config.groups.sandbox import SandboxConfig
from rlscale.config.rules import has_environment, has_tools, runs_agents
from rlscale.driver.open_agent_runner import open_admission, open_agent_runner
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import ConfigError, Problem, RenderError
from rlscale.models.hf_models import load_hf_fields
from rlscale.protocols import AgentGateway
from rlscale.renderers.answer_parser import Tokenizer
from rlscale.renderers.families import AUTO, make_renderer
from rlscale.renderers.message_images import MessageImages, check_image_role
from rlscale.renderers.renderer import Renderer
from rlscale.renderers.run_images import RunImages
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.group_generator import Generate

EPISODES = "environments"
"""Folder of the logs of environments, in the run folder."""


@asynccontextmanager
async def open_agent(prepared: PreparedRun, pool: EnginePool | None, *, folder: Path) -> AsyncIterator[Generate | None]:
    """Generates trajectories with the tools, the environment or the agent of the config; None: it has none.

    Args:
        pool: with the run's gateway, if the agent needs one. None: the run generates nothing.
        folder: of the run.

    Raises:
        ConfigError: a tool or the environment cannot be loaded.
    """
    config = prepared.config
    if has_tools(config):
        images = await asyncio.to_thread(load_images, prepared)
        renderer = build_renderer(prepared, images, role="tool")
        box = await open_tools(config.agent, config.sandbox, images=images)
        try:
            yield await _admitted(ToolAgent(box, renderer, config.agent, images=images), prepared, pool)
        except BaseException:
            await box.close(wait=False)
            raise
        await box.close(wait=True)
    elif has_environment(config):
        path, limit = config.agent.environment_path, config.agent.max_tool_chars
        assert path is not None, "the condition says so"
        environments = EnvironmentPool(EnvironmentSpec(path=path, custom=config.custom, max_chars=limit), config.agent)
        episodes = EnvironmentLog(folder / EPISODES, keep=config.agent.keep_logs)
        images = await asyncio.to_thread(load_images, prepared)
        renderer = build_renderer(prepared, images, role="user")
        agent = EnvironmentAgent(environments, renderer, config.agent, log=episodes, images=images)
        try:
            yield await _admitted(agent, prepared, pool)
        finally:
            await environments.close()
    elif runs_agents(config) and pool is not None and pool.gateway is not None:
        gateway = cast(AgentGateway, pool.gateway)  # the pool knows only how to pause it
        if (images := await asyncio.to_thread(load_images, prepared)) is not None:
            build_renderer(prepared, images, role="user")  # raises before an agent starts; the gateway has its own
        async with open_agent_runner(prepared, pool, gateway, folder=folder) as runner:
            yield runner
    else:
        yield None


async def _admitted(generate: Generate, prepared: PreparedRun, pool: EnginePool | None) -> Generate:
    """Generates as many trajectories at once as fit the KV cache of the engines."""
    assert pool is not None, "generation needs engines"
    positions = load_hf_fields(prepared.model_path).get("max_position_embeddings")
    admission = await open_admission(prepared.config, pool, is_local=True)
    return AdmittedAgent(generate, admission, max_context_len=positions if isinstance(positions, int) else None)


async def open_tools(config: AgentConfig, sandbox: SandboxConfig, *, images: RunImages | None = None) -> ToolBox:
    """All tools of the config. Raises ConfigError as `check_agent`.

    Args:
        images: of a run whose model reads images.
    """
    paths, servers = config.tools or [], config.mcp_servers or []
    tools = load_tools(paths)
    if problems := check_tool_images(tools, reads_images=images is not None):
        raise ConfigError(problems)
    functions = [tool for tool in tools if not needs_sandbox(tool)]
    callers: list[ToolCaller] = [FunctionTools(functions, paths, config)] if functions else []
    if len(functions) < len(tools):
        callers.append(SandboxTools(sandbox, max_chars=config.max_tool_chars))
    if servers:
        # Imported here: an extra installs the library, which takes half a second.
        from rlscale.agents.mcp_tools import McpTools

        found = await load_servers(servers, timeout_s=config.tool_timeout_s)
        if problems := check_server_names(tools, found):
            raise ConfigError(problems)
        callers += [
            McpTools(server, specs, config, reads_images=images is not None)
            for server, specs in zip(servers, found, strict=True)
        ]
    return ToolBox(callers, config, images=images)


def load_images(prepared: PreparedRun) -> RunImages | None:
    """The image processor of the policy; None: the run has no images."""
    if prepared.config.data.multimodal_keys is None:
        return None
    return RunImages.from_model(prepared.model_path, prepared.tokenizer)


def build_renderer(prepared: PreparedRun, images: RunImages | None = None, *, role: str = "user") -> Renderer:
    """The renderer of the policy's chat template.

    Args:
        images: of a run whose model reads images.
        role: of the messages that may have some.

    Raises:
        ConfigError: the template shows no images in such messages.
    """
    fields = load_hf_fields(prepared.model_path)
    checkpoint = prepared.config.model.hf_checkpoint or prepared.model_path
    renderer = make_renderer(
        AUTO,
        cast(Tokenizer, prepared.tokenizer),
        model_type=str(fields.get("model_type", "")),
        checkpoint=checkpoint,
        reads_images=images is not None,
    )
    if images is not None:
        try:
            check_image_role(renderer, MessageImages(images.processor.layout, images.placeholder), role)
        except RenderError as error:
            rule, fix = f"have a chat template that shows images in messages of the {role}", f"choose another; {error}"
            raise ConfigError([Problem(path="model.hf_checkpoint", rule=rule, value=checkpoint, fix=fix)]) from error
    return renderer
