"""The code of the tutorials of tools and environments works as it stands there."""

import importlib
import re
from pathlib import Path

import pytest

from rlscale.agents.environment import Action, Task
from rlscale.agents.environment_child import step_values
from rlscale.agents.environment_log import EnvironmentLog, Episode
from rlscale.agents.environment_replay import ReplayedEnvironment
from rlscale.agents.load_tools import load_tools
from rlscale.testing import check_environment
from tests.unit.agents.test_environment_log import START

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorial"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the Python files of the pages into the working folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for page in ("your-own-tools.md", "your-own-environment.md"):
        for block in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (TUTORIALS / page).read_text(), re.DOTALL):
            (tmp_path / block[1]).write_text(block[0])


def test_the_tool_and_its_test_work() -> None:
    (divide,) = load_tools(["my_tools:divide"])
    assert divide.description == "Divides two numbers."
    importlib.import_module("test_my_tools").test_divide()


def test_the_environment_and_its_test_work() -> None:
    importlib.import_module("test_my_game").test_digits()


def test_the_replay_works(tmp_path: Path) -> None:
    game = importlib.import_module("my_game").Digits
    (result, *_) = check_environment(game, action="42")
    episode = Episode(trajectory=0, task=Task(index=0, messages=()), start=START, end="done")
    episode.add_step(Action(text="42"), step_values(result, max_chars=100), 0.0)
    EnvironmentLog(tmp_path / "runs" / "my_game" / "environments", keep=1).write(episode)
    page = (TUTORIALS / "your-own-environment.md").read_text()
    (code,) = re.findall(r"```python\n(from rlscale.agents import Action\n.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["result"].reward == result.reward == 0.5  # type: ignore[attr-defined]
    assert isinstance(names["game"], ReplayedEnvironment)


def test_the_commands_of_an_agent_by_its_url() -> None:
    """The page from a fresh clone; tests/integration/test_agent_tutorial.py runs all but the installation."""
    page = (TUTORIALS / "agent-by-url.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert commands == [
        "bin/quickstart data.num_rollout=1",
        "source .venv/bin/activate",
        "pip install -c constraints.txt openai",
        "rlscale-train agent.function_path=my_agent:agent data.num_rollout=40 batch.rollout_batch_size=24 "
        "optim.lr=2e-4 run.name=my_agent",
        "rlscale-train 'agent.command=[python,my_program.py]' data.num_rollout=2 batch.rollout_batch_size=2 "
        "eval.max_examples=16 run.name=my_program",
    ]
    root = TUTORIALS.parents[1]
    assert (root / "bin" / "quickstart").is_file(), "the page names what a clone has"
    assert re.search(r"^openai==", (root / "constraints.txt").read_text(), re.MULTILINE)
