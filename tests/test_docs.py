"""Commands and code of README and docs work as documented."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.cli.app import main_train
from rlscale.cli.config import main as main_config
from rlscale.cli.data import main as main_data
from rlscale.cli.launch import main as main_launch
from rlscale.cli.plan import main as main_plan
from rlscale.config import RewardConfig, RunConfig, load_config_with_notes
from rlscale.engines.fake import FakeServer
from rlscale.launch.parse_options import flag_of, option_schemas
from rlscale.rewards import load_reward
from rlscale.testing import adapt, check_generate, check_rollout
from rlscale.types import Prompt, Sample
from tests.architecture import LAYERS
from tests.unit.config.interpreters import fake_interpreter

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"),
]
TUTORIAL = ROOT / "docs" / "tutorial" / "your-own-reward.md"
MAX_README_LINES = 150


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(name: str = "rlscale-train") -> list[list[str]]:
    """Arguments of every use of a command in a shell block, typed or run by a job."""
    lines = [
        line for page in PAGES for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index(name) + 1 :] for line in words if name in line]


def named_files() -> dict[str, str]:
    """The YAML files of the pages whose first line is a comment with their name."""
    found = [block for page in PAGES for block in blocks(page, "yaml")]
    return {name[1]: block for block in found if (name := re.match(r"# ([\w-]+\.yaml)\n", block))}


@pytest.mark.parametrize("argv", commands(), ids=" ".join)
def test_every_command_is_accepted(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in named_files().items():
        (tmp_path / name).write_text(content)
    python = str(fake_interpreter(tmp_path / "sglang"))
    argv = [word.replace("/opt/sglang/bin/python", python) for word in argv]
    jobs: list[RunConfig] = []

    def make_job(config: RunConfig) -> Any:
        jobs.append(config)
        return SimpleNamespace(run=lambda: SimpleNamespace(objective=0.5, run_dir=tmp_path))

    assert main_train(argv, make_job=make_job) == 0
    if "-m" in argv:  # its jobs may run in other processes
        (results,) = tmp_path.glob("runs/sweeps/*/results.json")
        assert len(json.loads(results.read_text())) > 3
    else:
        assert len(jobs) == (0 if "--help" in argv or "--cfg" in argv else 1)


@pytest.mark.parametrize("argv", commands("rlscale-plan"), ids=" ".join)
def test_every_plan_is_made(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_plan(argv) == 0
    assert "memory budgets" in capsys.readouterr().out


@pytest.mark.parametrize("argv", commands("rlscale-launch"), ids=" ".join)
def test_every_launch_writes_a_file(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main_launch([*argv, "--stdout"]) == 0
    assert "rlscale-train" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["slurm", "kuberay", "skypilot"])
def test_the_page_of_a_launcher_has_each_of_its_options(launcher: str) -> None:
    page = (ROOT / "docs" / "how-to" / f"{launcher}.md").read_text()
    options = {flag_of(name) for name in option_schemas(launcher)}
    # `--help` explains these two well enough, and no page needs them.
    assert {option for option in options if f"`{option}" not in page} <= {"--name", "--hardware"}
    named = set(re.findall(r"`(--[a-z-]+)", page)) - {"--stdout", "--submit", "--no-kill"}
    assert named <= options, named - options


def config_commands() -> list[list[str]]:
    """Arguments of every `rlscale-config` on the pages that needs no run folder."""
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if "$ rlscale-config" in line]
    return [line[1:] for line in words if not any(word.startswith(("runs/", "mine")) for word in line)]


@pytest.mark.parametrize("argv", config_commands(), ids=" ".join)
def test_every_config_command_prints_a_result(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_config(argv) == 0
    assert capsys.readouterr().out


def test_every_data_command_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_text("input\n1\n")
    (tmp_path / "train.json").write_text('[{"input": "1"}]')
    found = [argv for argv in commands("rlscale-data") if not argv[1].startswith("<")]
    assert {argv[0] for argv in found} == {"inspect", "convert"}
    for argv in found:
        (tmp_path / "train.jsonl").unlink(missing_ok=True)
        assert main_data(argv) == 0


def test_the_reward_of_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, trial, remote = blocks(TUTORIAL, "python")
    (tmp_path / "my_reward.py").write_text(first)
    (tmp_path / "remote_reward.py").write_text(remote)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = load_reward(RewardConfig(custom_path="my_reward:score"))
    sample = Sample(index=0, group_index=0, prompt=Prompt(index=0, text="1+1=", token_ids=(1,), label="20"), seed=0)
    scores = []
    for sample.response in ("20", "21", "2"):
        scores.append(reward(sample))
    assert scores == [1.0, 0.1, 0.0]
    exec(trial, {})
    load_reward(RewardConfig(custom_path="remote_reward:score"))


def test_the_commands_of_the_tutorial_give_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward.py").write_text(blocks(TUTORIAL, "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [line for block in blocks(TUTORIAL, "bash") for line in block.splitlines() if "reward.custom_path" in line]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        assert load_config_with_notes(words).warnings == ()
    (warning,) = load_config_with_notes([*words, "reward.type=math"]).warnings
    assert warning.startswith("reward.type is ignored"), "who sets both gets a warning"


def test_the_generate_function_on_the_page_of_plug_ins_makes_a_sample() -> None:
    program, rollout, _ = blocks(ROOT / "docs" / "how-to" / "plug-ins.md", "python")
    names: dict[str, Any] = {}
    exec(program, names)
    samples = check_generate(adapt("generate", names["generate"]))
    assert [sample.response for sample in samples] == ["2", "2"]
    exec(rollout, names)
    assert len(check_rollout(adapt("rollout", names["rollout"]))) == 2


def test_the_test_of_a_function_on_the_page_of_plug_ins_passes() -> None:
    _, _, program = blocks(ROOT / "docs" / "how-to" / "plug-ins.md", "python")
    names: dict[str, Any] = {}
    exec(program, names)
    names["test_score"]()
    names["score"] = lambda args, sample, **kwargs: 1.0
    with pytest.raises(AssertionError):
        names["test_score"]()


def test_the_client_program_of_the_docs_works(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks(ROOT / "docs" / "how-to" / "talk-to-an-engine.md", "python")
    with FakeServer(token_s=0.005) as fake:
        exec(program.replace("http://127.0.0.1:30000", fake.url), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] in ("stop", "length") for line in printed[:2]] == [True, True]
    assert len(printed) > 3 and all(later.startswith(line) for line, later in pairwise(printed[2:]))


def test_the_reward_of_the_readme_is_that_of_the_tutorial() -> None:
    assert blocks(TUTORIAL, "python")[0] in blocks(ROOT / "README.md", "python")


def test_the_readme_is_short_and_its_links_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= MAX_README_LINES
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_folders_of_the_readme_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where things are")[1].split("```")[1]
    names = [name for line in tree.splitlines() for name in re.findall(r"^(?:  )?((?:[\w]+(?:/|\.py) ?)+)", line)]
    inside = [word for line in names for word in line.split()]
    missing = [n for n in inside if not (ROOT / n).exists() and not (ROOT / "src" / "rlscale" / n).exists()]
    assert len(inside) > 20
    assert missing == []
    parts = {part for layer in LAYERS for part in layer} - {"__init__"}
    assert parts == {
        name.strip("/").removesuffix(".py") for name in inside if (ROOT / "src" / "rlscale" / name).exists()
    }
