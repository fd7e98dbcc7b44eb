"""The two agents of the example behind a gateway without engines."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlscale.agents.run_task import AgentSession, AgentTask
from rlscale.data.data_paths import resolve_data_path
from rlscale.examples.two_agents import LISTENER, play
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, SamplingParams
from tests.agent_gateway import FakeGateway

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_agent_examples.py"
SPEAKER = "Number 472. Send three letters to your partner."


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway().start()
    yield gateway
    gateway.stop()


def answers(said: str, understood: str) -> Callable[[list[dict[str, Any]]], str]:
    """Those of the policy: as the speaker, who gets the number, and as the listener."""
    return lambda messages: said if messages[-1]["content"] == SPEAKER else understood


@pytest.mark.parametrize(
    ("said", "letters"), [("ehc", "ehc"), ("ehcd", "ehc"), ("472 is E-H-C", "ise"), ("472", ""), ("", "")]
)
@pytest.mark.slow
async def test_only_three_letters_reach_the_listener(gateway: FakeGateway, said: str, letters: str) -> None:
    gateway.answer = answers(said, "472")
    messages = [{"role": "user", "content": SPEAKER}]
    prompt = Prompt(index=0, text="", token_ids=(1, 2), label="472")
    trajectory = Trajectory(id=1, group_index=0, prompt=prompt, seed=1)
    access = await gateway.open_session(trajectory, SamplingParams(max_new_tokens=16), lifetime_s=60, max_turns=2)
    result = await play(AgentTask(id=1, row=0, messages=messages, label="472"), AgentSession.from_access(access))
    assert result == {"metadata": {"letters": letters}}, "the reward of the config grades the answer of the listener"
    first, second = gateway.open[access.id].requests
    assert first["messages"] == messages
    assert second["messages"] == [{"role": "user", "content": LISTENER.format(letters=letters)}]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_agent_examples_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demonstrations_are_those_of_the_agent_and_hold_no_held_out_number(script: ModuleType) -> None:
    assert script.LISTENER == LISTENER
    rows = {
        name: [json.loads(line) for line in resolve_data_path(f"builtin:two_agents/{name}.jsonl").open()]
        for name in ("train", "heldout", "demos")
    }
    heldout = {row["label"] for row in rows["heldout"]}
    assert len(heldout) == 200 and not heldout & {row["label"] for row in rows["train"]}
    code = dict(zip("0123456789", script.CODE_LETTERS, strict=True))
    right = {"Number": 0, "Your": 0}
    for question, answer in (row["messages"] for row in rows["demos"]):
        kind = question["content"].split()[0]
        shown = re.search(r"Number (\d+)|sent ([a-j]+)", question["content"])
        assert shown is not None
        number = shown[1] or "".join(str(script.CODE_LETTERS.index(letter)) for letter in shown[2])
        assert number not in heldout
        letters = "".join(code[digit] for digit in number)
        right[kind] += answer["content"] == (letters if kind == "Number" else number)
    # Half of each kind, which are about half of all, so that both are right in about a quarter of the games.
    assert all(0.2 < count / len(rows["demos"]) < 0.3 for count in right.values()), right
