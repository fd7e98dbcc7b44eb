"""A gateway in front of an engine whose answers a test scripts."""

from collections.abc import Iterator
from typing import cast

import pytest

from rlscale.gateway.gateway_process import GatewayProcess
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.types import SamplingParams
from tests.gateway_fixtures import LoggedFake
from tests.scripted_engine import Script, scripted_engine, scripted_gateway


class CurrentScript:
    """The script of the test that runs; the engine is shared."""

    def __init__(self) -> None:
        self.script: Script = lambda text: ""

    def __call__(self, text: str) -> str:
        return self.script(text)


@pytest.fixture(scope="module")
def current() -> CurrentScript:
    return CurrentScript()


@pytest.fixture(scope="module")
def engine(current: CurrentScript) -> Iterator[LoggedFake]:
    with scripted_engine(current) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: LoggedFake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with scripted_gateway(tmp_path_factory.mktemp("gateway"), engine) as gateway:
        yield gateway


@pytest.fixture
def session() -> GenerateSession:
    pool = cast(EnginePool, None)  # the gateway has the engines
    params = SamplingParams(max_new_tokens=2000, sampling_seed=7, max_context_len=30_000)
    return GenerateSession(params=params, rid="train-0-0", pool=pool, versions=(0, 0))
