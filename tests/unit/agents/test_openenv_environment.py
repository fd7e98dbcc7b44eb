"""Environments of an OpenEnv server: a fake one with its WebSocket protocol."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from rlscale.agents.environment import Action, StepResult, Task
from rlscale.agents.openenv_environment import OpenEnvEnvironment
from rlscale.errors import ConfigError

TASK = Task(index=0, messages=(), seed=5)


class FakeOpenEnv:
    """Counts messages; the third step is done, and the action `boom` is an error."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.num_open = 0

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        self.num_open += 1
        steps = 0
        async for message in connection:
            assert message.type == WSMsgType.TEXT
            given = message.json()
            self.received.append(given)
            if given["type"] == "close":
                break
            steps += given["type"] == "step"
            if given.get("data", {}).get("message") == "boom":
                await connection.send_json({"type": "error", "data": {"message": "bad action", "code": "X"}})
                continue
            if given.get("data", {}).get("message") == "die":
                break
            observation = {"echo": f"seen {steps}", "length": steps}
            data = {"observation": observation, "reward": steps / 2, "done": steps == 3}
            await connection.send_json({"type": "observation", "data": data})
        self.num_open -= 1
        return connection


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeOpenEnv, str]]:
    server = FakeOpenEnv()
    app = web.Application()
    app.router.add_get("/ws", server.serve)
    async with TestServer(app) as running:
        yield server, str(running.make_url("")).rstrip("/")


def environment(url: str, **settings: str) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(custom={"openenv": {"url": url, **settings}})


async def test_an_episode_of_a_server(fake: tuple[FakeOpenEnv, str]) -> None:
    server, url = fake
    game = environment(url, action_field="message")
    assert await game.reset(TASK) == "seen 0"
    steps = [await game.step(Action(text=text)) for text in ("a", "b", "c")]
    await game.close()
    assert steps[0] == StepResult(messages="seen 1", reward=0.5)
    assert steps[2] == StepResult(reward=1.5, done=True)
    assert server.received[0] == {"type": "reset", "data": {"seed": 5}}
    assert server.received[1] == {"type": "step", "data": {"message": "a"}}
    assert server.received[-1] == {"type": "close"}


async def test_an_action_may_be_the_json_of_the_policy(fake: tuple[FakeOpenEnv, str]) -> None:
    server, url = fake
    game = environment(url, observation_field="length")
    assert await game.reset(TASK) == "0"
    assert (await game.step(Action(text="no json"))).messages == "Error: an action must be a JSON object"
    assert (await game.step(Action(text='{"x": 1}'))).messages == "1"
    assert server.received[-1] == {"type": "step", "data": {"x": 1}}
    await game.close()


@pytest.mark.parametrize(("action", "message"), [("boom", "refused step: bad action"), ("die", "closed the session")])
async def test_an_error_of_the_server_is_a_failure(fake: tuple[FakeOpenEnv, str], action: str, message: str) -> None:
    game = environment(fake[1], action_field="message")
    await game.reset(TASK)
    with pytest.raises((RuntimeError, ConnectionError), match=message):
        await game.step(Action(text=action))
    await game.close()


def test_a_wrong_url_is_named() -> None:
    with pytest.raises(ConfigError, match=r"custom\.openenv\.url must be the URL of a server, got x"):
        environment("x")
