"""Trajectories of five kinds of agents through the production path, compared with the engine's own log of tokens.

groups ──> tools, environment ─────────────────────> pool ──┐
      └──> function, command, branches ──> gateway ──> ids ─┴──> engine, which logs what it got and sampled
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rlscale.agents.admitted_agent import AdmittedAgent
from rlscale.agents.agent_runner import AgentLimits, AgentRunner
from rlscale.agents.environment_agent import EnvironmentAgent
from rlscale.agents.environment_child import EnvironmentSpec
from rlscale.agents.environment_pool import EnvironmentPool
from rlscale.agents.load_tools import load_tools
from rlscale.agents.run_admission import AgentAdmission
from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_function import FunctionAgent
from rlscale.agents.run_log import AgentLogs
from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_pool import FunctionTools, ToolBox
from rlscale.config.groups.agent import AgentConfig
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.server.engine_service import EngineService, build_app
from rlscale.engines.server.http_server import Server
from rlscale.gateway.codec import Codec
from rlscale.gateway.gateway_client import GatewayClient
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession, SessionFactory
from rlscale.rollout.group_generator import Generate, GroupGenerator, GroupSettings
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Failure, Group, Prompt, Sample, SamplingParams
from tests.gateway_fixtures import EngineEntry, log_generations
from tests.mixed_parts import COMMAND, branches, tool_loop

KINDS = ("tools", "environment", "function", "command", "branches")
NUM_SAMPLES = 4  # of a group
TOOLS, GAME = "tests.mixed_parts:add", "tests.mixed_parts:Game"

Call: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Ids before an answer, its ids, and their logprobs as float32."""


def draws(text: str) -> str:
    """Text of an answer, drawn from that of the request: a number, a call of the tool, or a wrong call."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    if "add(" in text and number % 10 < 5:
        return f"<|call|>add {number // 10 % 90} {number // 900 % 90}"
    if "add(" in text and number % 10 == 5:
        return "<|call|>nothing"
    return str(number % 10 ** (1 + number // 7 % 12))


@dataclass
class EngineLog:
    """A running engine with a log of its tokens."""

    address: EngineAddress
    entries: list[EngineEntry] = field(default_factory=list)


def logged_calls(entries: Sequence[EngineEntry]) -> Counter[Call]:
    """What the engine got and sampled."""
    return Counter((each.input_ids, each.output_ids, _float32(each.logprobs)) for each in entries)


@contextmanager
def serve_logged(service: EngineService) -> Iterator[EngineLog]:
    """Serves an engine from a thread of this process and logs what it generates."""
    loop = asyncio.new_event_loop()
    log = EngineLog(EngineAddress(name="engine 0", url=""))
    log_generations(service, log.entries)
    server = Server(build_app(service, api_key=None), host="127.0.0.1", port=0)
    thread = threading.Thread(target=loop.run_forever, name="engine", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(timeout=60)
    log.address = EngineAddress(name="engine 0", url=server.url)
    try:
        yield log
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(timeout=60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class LengthReward:
    """Grades trajectories whose agent has not."""

    async def score(self, samples: Sequence[Sample], **options: Any) -> Mapping[int, Failure]:
        for sample in samples:
            sample.reward = float(len(sample.response_ids) % 2)
        return {}


@dataclass
class MixedRun:
    """Groups of all agents; those of one group have one agent."""

    generator: GroupGenerator
    codec: Codec
    groups: list[Group] = field(default_factory=list)

    async def run(self, num_groups: int, *, num_parallel: int = 32) -> None:
        slots = asyncio.Semaphore(num_parallel)

        async def one(index: int) -> Group:
            async with slots:
                return await self.generator.run(index, self._prompt(index), versions=(0, 0))

        self.groups = await asyncio.gather(*[one(index) for index in range(num_groups)])

    def _prompt(self, index: int) -> Prompt:
        messages = ({"role": "user", "content": f"{index}+{index % 7}="},)
        ids = tuple(self.codec.renderer.render(messages))
        return Prompt(index=index, text="", token_ids=ids, label=str(index + index % 7), messages=messages)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def trained_calls(self) -> Counter[Call]:
        """The sampled tokens of all samples that are trained, answer by answer."""
        return Counter(call for sample in self.samples for call in _trained(sample))

    def counts(self) -> dict[str, int]:
        """Figures of the run."""
        trajectories = {sample.index for sample in self.samples}
        tokens = sum(int(sample.loss_mask.sum()) for sample in self.samples)
        kinds = Counter(KINDS[group.index % len(KINDS)] for group in self.groups for _ in range(NUM_SAMPLES))
        return {
            "trajectories": len(trajectories),
            **{f"of {kind}": number for kind, number in kinds.items()},
            "failed": sum(len(group.failed) for group in self.groups),
            "samples": len(self.samples),
            "calls": self.trained_calls().total(),
            "sampled tokens": tokens,
        }


@asynccontextmanager
async def mixed_run(
    engine: EngineAddress, gateway: GatewayClient, codec: Codec, folder: Path, *, max_new_tokens: int
) -> AsyncIterator[MixedRun]:
    """All parts of a run but the trainer."""
    pool = EnginePool([HttpEngine(engine, timeout_s=300)])
    config = AgentConfig(max_turns=4, timeout_s=300.0, tool_processes=1, environment_processes=1)
    box = ToolBox([FunctionTools(load_tools([TOOLS]), [TOOLS], config)], config)
    environments = EnvironmentPool(EnvironmentSpec(path=GAME), config)
    program = folder / "command_agent.py"
    program.write_text(COMMAND)
    limits = AgentLimits(timeout_s=300.0, max_turns=6)
    logs = AgentLogs(folder / "agents", keep=1, max_bytes=100_000)

    def runner(agent: Any, *, at_once: int) -> AgentRunner:
        return AgentRunner(gateway, agent, limits, logs=logs, admission=AgentAdmission(at_once))

    agents: list[Generate] = [
        AdmittedAgent(ToolAgent(box, codec.renderer, config), AgentAdmission(64)),
        AdmittedAgent(EnvironmentAgent(environments, codec.renderer, config), AgentAdmission(64)),
        runner(FunctionAgent(tool_loop), at_once=32),
        runner(CommandAgent(command=["python", str(program)]), at_once=8),
        runner(FunctionAgent(branches), at_once=32),
    ]

    async def generate(trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        return await agents[trajectory.group_index % len(agents)](trajectory, session)

    params = SamplingParams(max_new_tokens=max_new_tokens, sampling_seed=3, max_context_len=2_000)
    settings = GroupSettings(num_samples=NUM_SAMPLES, generate=generate, max_retries=0)
    try:
        yield MixedRun(GroupGenerator(SessionFactory(pool, params), LengthReward(), settings), codec)
    finally:
        await box.close(wait=True)
        await environments.close()
        await pool.close()


def _trained(sample: Sample) -> Iterator[Call]:
    """Each run of trained tokens, which is one answer: a request always adds tokens between two of them."""
    tokens, mask = list(sample.tokens), np.asarray(sample.loss_mask)
    first = len(tokens) - len(mask)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        before, own = tokens[: first + start], tokens[first + start : first + end]
        yield tuple(before), tuple(own), _float32(sample.rollout_logprobs[start:end])


def _float32(values: Any) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float32).tolist())
