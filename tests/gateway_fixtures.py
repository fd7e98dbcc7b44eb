"""A gateway in its own process in front of a fake engine that keeps a log of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.engines.fake import FakeServer
from rlscale.engines.server.engine_service import EngineService
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.gateway.gateway_client import GatewayClient, GatewaySession
from rlscale.gateway.gateway_process import GatewayLaunch, GatewayProcess
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Prompt, SamplingParams
from tests.gateway_codec import VOCAB_SIZE

MAX_CONTEXT_LEN = 4096


@dataclass(frozen=True)
class EngineEntry:
    """A request as the engine saw it, with one of its answers."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float


@dataclass
class LoggedFake:
    """A fake engine and all that it generated."""

    server: FakeServer
    entries: list[EngineEntry] = field(default_factory=list)

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(name="engine 0", url=self.server.url)

    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return sorted((each.input_ids, each.output_ids) for each in self.entries)


def log_generations(service: EngineService, entries: list[EngineEntry]) -> None:
    """Adds what an engine gets and samples to `entries`."""
    generate = service.generate

    async def log(request: GenerateRequest) -> list[Answer]:
        answers = await generate(request)
        entries.extend(
            EngineEntry(request.input_ids, tuple(each.output_ids), tuple(each.logprobs), request.params.temperature)
            for each in answers
        )
        return answers

    service.generate = log  # type: ignore[method-assign]


@contextmanager
def logged_fake(**options: Any) -> Iterator[LoggedFake]:
    with FakeServer(vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT_LEN, **options) as server:
        logged = LoggedFake(server)
        log_generations(server.service, logged.entries)
        yield logged


@contextmanager
def gateway_process(folder: Path, engines: Sequence[EngineAddress], **codec: Any) -> Iterator[GatewayProcess]:
    launch = GatewayLaunch(
        folder=folder / "sessions",
        log_folder=folder / "logs",
        model="policy",
        codec={"factory": "tests.gateway_codec:build_codec", "arguments": codec},
    )
    process = GatewayProcess(launch, engines)
    try:
        process.start()
        yield process
    finally:
        process.stop()


def new_trajectory(number: int = 0) -> Trajectory:
    return Trajectory(
        id=number, group_index=number // 4, prompt=Prompt(index=0, text="", token_ids=(5, 6)), seed=number
    )


def params(**values: Any) -> SamplingParams:
    given = {"max_new_tokens": 2000, "sampling_seed": 7, "max_context_len": MAX_CONTEXT_LEN, **values}
    return SamplingParams(**given)


def sampled_pairs(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The calls in a trajectory: ids before each sampled turn, and its own."""
    return sorted(
        (tuple(_ids_before(trajectory, turn.parent, number)), tuple(turn.token_ids.tolist()))
        for number, turn in enumerate(trajectory.turns)
        if turn.sampled
    )


def _ids_before(trajectory: Trajectory, parent: int | None, number: int) -> list[int]:
    whole = trajectory.token_ids(number)
    return whole[: len(whole) - len(trajectory.turns[number].token_ids)]


async def open_session(client: GatewayClient, **values: Any) -> GatewaySession:
    turns = values.pop("max_turns", None)
    return await client.open_session(new_trajectory(), params(**values), lifetime_s=600, max_turns=turns)


def check_exact(trajectory: Trajectory, fake: LoggedFake) -> None:
    assert sampled_pairs(trajectory) == fake.pairs()
    logged = sorted(np.float32(value) for each in fake.entries for value in each.logprobs)
    assert sorted(value for turn in trajectory.turns if turn.sampled for value in turn.logprobs) == logged
