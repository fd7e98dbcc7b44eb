"""Results of episodes of `verifiers`. With the real library: tests/ranks/agents."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.agents.verifiers_server import KEY_VARIABLE, VerifiersServer, _result, main

OWN, OTHER = object(), object()


def trace(reward: float, *, trainable: bool = True, client: object = OWN, error: str | None = None) -> Any:
    agent = SimpleNamespace(trainable=trainable, config=SimpleNamespace(client=client))
    errors = [] if error is None else [SimpleNamespace(type="ProviderError", message=error)]
    return SimpleNamespace(
        agent=agent, reward=reward, metrics={"turns": 2.0, "unscored": None}, stop_condition="done", errors=errors
    )


def episode(*traces: Any, ok: bool = True) -> Any:
    return SimpleNamespace(ok=ok, errors=[], traces=list(traces))


def test_the_reward_is_the_mean_of_the_agents_that_are_trained() -> None:
    judge = trace(9.0, trainable=False, client=OTHER)
    assert _result(episode(trace(1.0), trace(0.0), judge), OWN) == {
        "reward": 0.5,
        "metadata": {"verifiers": {"metrics": {"turns": 2.0}, "stop": "done"}},
    }


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (episode(trace(1.0), trace(0.0, error="no answer"), ok=False), "the episode failed: ProviderError: no answer"),
        (episode(trace(1.0), trace(1.0, trainable=False)), "agents that are not trained must have a client"),
        (episode(trace(1.0, trainable=False, client=OTHER)), "must have an agent that is trained"),
    ],
)
def test_what_has_no_reward_is_an_error(found: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _result(found, OWN)


@pytest.mark.parametrize("key", [None, ""], ids=["unset", "empty"])
def test_other_machines_need_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str | None
) -> None:
    config = tmp_path / "env.toml"
    config.write_text('[env.taskset]\nid = "gsm8k"\n')
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(SystemExit) as ended:
        main([str(config), "--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert f"set {KEY_VARIABLE}" in capsys.readouterr().err


async def test_a_key_that_is_no_text_is_refused() -> None:
    server = object.__new__(VerifiersServer)  # its library is not installed here
    server._key = "secret"
    request: Any = SimpleNamespace(headers={"Authorization": "Bearer \udcff"})  # as aiohttp reads the byte 255
    assert (await server._run(request)).status == 401
