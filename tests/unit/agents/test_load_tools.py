"""Tools of the config: all wrong ones are found before anything starts."""

from pathlib import Path

import pytest

from rlscale.agents.load_tools import load_tools
from rlscale.config.user_functions import check_hooks
from rlscale.driver.preflight import CHECKS
from rlscale.driver.preflight.agent_checks import check_agent
from rlscale.errors import ConfigError
from tests.unit.config.rules.valid_config import config_with

MODULE = """
from rlscale.agents import tool

@tool
def add(a: int, b: int) -> int: return a + b

@tool(name="add")
def plus(a: int, b: int) -> int: return a + b

@tool
def vague(a) -> int: return a

def plain(a: int) -> int: return a

both = [add, tool(plain)]

class Half:
    def reset(self, task): return "text"

class Proxy:
    def __getattr__(self, name): return print
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_to_load.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_paths_name_tools_and_lists_of_tools() -> None:
    assert [each.name for each in load_tools(["tools_to_load:both"])] == ["add", "plain"]


def test_every_wrong_path_is_one_problem() -> None:
    paths = ["no_such_module:a", "tools_to_load:ad", "tools_to_load:plain", "tools_to_load:vague"]
    with pytest.raises(ConfigError) as caught:
        load_tools([*paths, "tools_to_load:add", "tools_to_load:plus"])
    lines = [str(problem) for problem in caught.value.problems]
    assert lines[0].startswith(
        "agent.tools.0 must be importable, got no_such_module:a; importing 'no_such_module' failed"
    )
    assert lines[1].endswith("has no 'ad'; did you mean add?")
    assert lines[2:] == [
        "agent.tools.2 must be a tool or a list of tools, got tools_to_load:plain; it is a value of type function; "
        "write @rlscale.agents.tool above the function",
        "agent.tools.3 must have a type for every parameter, got tools_to_load:vague; the function vague has a without "
        "one",
        "agent.tools.5 must have tools with different names, add is there twice, got tools_to_load:plus; remove one, "
        "or set @tool(name=...)",
    ]


def test_a_run_is_checked_before_it_starts() -> None:
    problems = check_agent(config_with({"agent.tools": ["tools_to_load:vague"]}))
    problems += check_hooks(config_with({"agent.environment_path": "tools_to_load:nothing"}))
    assert {check_agent, check_hooks} <= set(CHECKS)
    assert [problem.path for problem in problems] == ["agent.tools.0", "agent.environment_path"]


def test_the_class_of_an_environment_has_its_methods() -> None:
    (problem,) = check_hooks(config_with({"agent.environment_path": "tools_to_load:Half"}))
    assert str(problem) == (
        "agent.environment_path must have the methods reset and step, got tools_to_load:Half; define step"
    )
    assert check_hooks(config_with({"agent.environment_path": "tools_to_load:Proxy"})) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["python", "gone.py"], "agent.command.1 must be an existing file, got gone.py; check the name, which is"),
        (
            ["python gone.py", "-v"],
            "program that can be executed, got python gone.py; write each word as an entry, "
            'agent.command=["python", "gone.py", "-v"]',
        ),
        (["no_such_program"], "agent.command.0 must be a program that can be executed, got no_such_program; install"),
    ],
)
def test_a_command_names_a_program_and_its_script(command: list[str], problem: str) -> None:
    (found,) = check_agent(config_with({"agent.command": command}))
    assert problem in str(found)


def test_a_command_may_have_a_script_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_agent(config_with({"agent.command": ["python", "tools_to_load.py"]})) == []
    assert check_agent(config_with({"agent.command": ["python", "-m", "gone.py"]})) == []
    assert check_agent(config_with({"agent.command": ["sh", "-c", "true"]})) == []
