"""Engines of models that stay as they are: started with the run, restarted when they die, never given new weights.

They are those of a judge or reward model, `reward.engine`, and of the further models of `sglang.config`.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlscale.cluster.ray_calls import WATCH_INTERVAL_S, find_dead_engine
from rlscale.cluster.ray_engines import RayEngines, cores_per_engine
from rlscale.cluster.ray_session import Bundles
from rlscale.config import RunConfig
from rlscale.config.groups.judge import RewardEngineConfig, RewardEngineKind
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.config.rules import frozen_models, reward_engine_kind
from rlscale.control.recovery import Restarts
from rlscale.driver.prepared_run import PreparedRun
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.errors import WorkerError
from rlscale.rewards import JudgeSpec
from rlscale.types import EngineAddress

NAME = "reward engine"


class RewardEngines:
    """The engines of one frozen model of a run. Attempts of a run use them one after the other.

    Args:
        bundles: of the placement group, on which the actors of the engines start now.
        number: of the further model; None: that of `reward.engine`.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        bundles: Bundles,
        *,
        log_folder: Path,
        restarts: Restarts,
        number: int | None = None,
    ) -> None:
        config, layout, self._restarts = prepared.config, prepared.layout, restarts
        self.name = None if number is None else layout.frozen[number].name
        self._engine = config.reward.engine if self.name is None else frozen_models(config)[self.name]
        self._model_path = judge_model(self._engine, prepared.model_path)
        launch = build_reward_launch(
            config,
            self._engine,
            name=NAME if self.name is None else f"{self.name} engine",
            model_path=self._model_path,
            num_threads=cores_per_engine(layout),
        )
        layout = layout.reward_layout if number is None else layout.frozen_layout(number)
        self._servers = RayEngines(launch, layout, bundles, log_folder=log_folder, on_killed=restarts.allow)
        self._config, self._tolerance = config.reward, config.fault_tolerance
        self._addresses: list[EngineAddress] = []
        self._started_at: list[float] = []  # by engine

    async def start(self) -> JudgeSpec:
        """The engines for clients, once every server is healthy. Servers that already run are only waited for."""
        self._addresses = await self._servers.start()
        self._started_at = [time.monotonic()] * len(self._addresses)
        return JudgeSpec(
            addresses=tuple(self._addresses),
            model_path=self._model_path,
            is_embedding=self._engine.is_embedding,
            max_concurrency=self._config.max_concurrency,
        )

    async def watch(self, replaced: Callable[[Sequence[EngineAddress]], None]) -> None:
        """Restarts dead engines until cancelled. Raises WorkerError at the limit of restarts, at once without any.

        Args:
            replaced: called with all addresses after a restart.
        """
        checked_at = time.monotonic()
        while True:
            dead = await self._servers.find_dead()
            if not dead and self._tolerance.enabled and time.monotonic() - checked_at >= self._check_interval_s:
                dead, checked_at = await self._find_hung(), time.monotonic()
            for index, reason in dead.items():
                await self._restart(index, reason)
                replaced(self._addresses)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def find_dead(self) -> WorkerError | None:
        """The first engine whose process is gone, with the reason."""
        return await find_dead_engine(self._servers.named_actors)

    def kill(self) -> None:
        self._servers.kill()

    def describe(self) -> str:
        """One line for the start of a run."""
        return f"{', '.join(self._servers.names)} will serve {self._model_path} to {self._users}"

    @property
    def _users(self) -> str:
        return "rewards" if self.name is None else f"user code as model {self.name}"

    @property
    def _check_interval_s(self) -> float:
        return self._tolerance.health_check_interval_s

    async def _find_hung(self) -> dict[int, str]:
        """Index and reason of every engine that does not answer its health check."""
        limit_s = self._tolerance.health_check_timeout_s
        oldest = time.monotonic() - self._tolerance.health_check_first_wait_s
        due = [index for index, started in enumerate(self._started_at) if started <= oldest]
        answers = await asyncio.gather(*(self._is_healthy(self._addresses[index], limit_s) for index in due))
        reason = f"did not answer its health check within {limit_s:g} s"
        return {index: reason for index, healthy in zip(due, answers, strict=True) if not healthy}

    @staticmethod
    async def _is_healthy(address: EngineAddress, limit_s: float) -> bool:
        engine = HttpEngine(address, timeout_s=limit_s)
        try:
            return await engine.health(timeout_s=limit_s)
        finally:
            await engine.close()

    async def _restart(self, index: int, reason: str) -> None:
        name = self._servers.names[index]
        failure = WorkerError(name, reason, died=True)
        while True:
            self._restarts.allow(failure)
            try:
                self._addresses[index] = await self._servers.restart(index)
            except WorkerError as error:
                failure = error
            else:
                self._started_at[index] = time.monotonic()
                return


def judge_model(engine: RewardEngineConfig, starting_model: str) -> str:
    """Folder or hub id of the model. Folders are absolute: actors of a running Ray have other working folders."""
    given = engine.hf_checkpoint
    if given is None:
        return starting_model
    folder = Path(os.path.expanduser(given))
    return str(folder.resolve()) if folder.exists() else given


def build_reward_launch(
    config: RunConfig, engine: RewardEngineConfig, *, model_path: str, num_threads: int, name: str = NAME
) -> EngineLaunch:
    """Command and settings of one engine of a frozen model; its API key is set later.

    Args:
        name: of the engines, which a number follows.
        num_threads: cores it may use on a CPU.
    """
    if reward_engine_kind(config) == RewardEngineKind.embedded:
        return EmbeddedLaunch(
            name=name,
            model_path=model_path,
            dtype=config.train.dtype,
            device=config.cluster.device,
            max_context_len=engine.max_context_len,
            num_threads=num_threads,
            seed=config.rollout.seed,
            num_slots=config.rollout.num_slots,
            deterministic=config.rollout.deterministic,
        )
    own = {"is_embedding": True} if engine.is_embedding else {}
    return SglangLaunch(
        name=name,
        model_path=model_path,
        dtype=config.train.dtype,
        device=config.cluster.device,
        max_context_len=engine.max_context_len,
        num_threads=num_threads,
        seed=config.rollout.seed,
        python=find_python(config.sglang.python),
        num_gpus=engine.num_gpus_per_engine,
        server_args={**own, **engine.server_args},
    )
