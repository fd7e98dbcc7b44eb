"""A gateway in front of a fake engine, for the tests with the vendors' own clients."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rlscale.gateway.gateway_client import GatewayClient
from rlscale.gateway.gateway_process import GatewayProcess
from tests.gateway_fixtures import LoggedFake, gateway_process, logged_fake


@pytest.fixture(scope="module")
def fake() -> Iterator[LoggedFake]:
    with logged_fake() as logged:
        yield logged


@pytest.fixture(scope="module")
def gateway(fake: LoggedFake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with gateway_process(tmp_path_factory.mktemp("gateway"), [fake.address], calls_tools=True) as process:
        yield process


@pytest.fixture
async def client(gateway: GatewayProcess, fake: LoggedFake) -> AsyncIterator[GatewayClient]:
    fake.entries.clear()
    client = GatewayClient(gateway.address)
    yield client
    await client.close()
