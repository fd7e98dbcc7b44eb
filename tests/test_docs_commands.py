"""Every command of README and docs: executed here or by another test, or listed with the reason why it cannot be."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlscale.cli.app import main_train
from rlscale.cli.check_plugin import main as main_check_plugin
from rlscale.cli.check_template import main as main_check_template
from rlscale.cli.config import main as main_config
from rlscale.cli.migrate import main as main_migrate
from rlscale.config import RunConfig
from rlscale.config.hydra.config_folders import ConfigFolders
from tests.docs_lines import BY_TESTS, COMPOSED, RUNS, lines
from tests.test_docs import PAGES, ROOT, TUTORIAL, blocks


def _no_job(config: RunConfig) -> Any:
    raise AssertionError("the command starts no run")


MAINS: dict[str, Callable[[list[str]], int]] = {
    "rlscale-train": lambda argv: main_train(argv, make_job=_no_job),
    "rlscale-check-plugin": main_check_plugin,
    "rlscale-check-template": main_check_template,
    "rlscale-config": main_config,
    "rlscale-migrate": main_migrate,
}

EXECUTED = (
    r"rlscale-migrate ",
    r"rlscale-check-plugin ",
    r"rlscale-check-template tiny_qwen3_agent",
    r"rlscale-config schema ",
    r"rlscale-train --help",
    r"rlscale-train \+experiment=qwen3_4b_grpo --cfg job",
)
"""Patterns of the commands that the tests below execute."""

BY_OTHER_TESTS = {
    r"bin/quickstart": "tests/packaging/test_quickstart.py",
    r"source \.venv/bin/activate": "tests/packaging/test_quickstart.py",
    r"rlscale-plan ": "tests/test_docs.py",
    r"rlscale-launch (slurm|kuberay --image registry|skypilot)": "tests/test_docs.py",
    r"rlscale-config (help|explain|diff quickstart 'exp)": "tests/test_docs.py",
    r"rlscale-config (diff|minimize) ": "tests/unit/cli/test_config.py",
    r"rlscale-data (inspect|convert) ": "tests/test_docs.py",
    r"rlscale-train reward\.custom_path=my_reward:score data\.num_rollout=50 ": "tests/integration/test_tutorial.py",
    r"rlscale-report ": "tests/integration/test_tutorial.py",
    r"rlscale-train -sc install|eval \"\$\(rlscale-train -sc": "tests/unit/cli/test_config.py",
    r"rlscale-train agent\.(function_path=my_agent|'?agent)": "tests/integration/test_agent_tutorial.py",
    r"rlscale-train 'agent\.command=\[python,my_program": "tests/integration/test_agent_tutorial.py",
    r"rlscale-convert ": "tests/ranks/cli/test_convert.py",
    r"torchrun .*rlscale\.cli\.convert": "tests/ranks/cli/test_convert.py",
    r"rlscale-doctor": "tests/integration/test_doctor.py",
    r"rlscale-crashtest ": "tests/integration/test_crash.py",
    r"rlscale-eval ": "tests/integration/test_evaluation.py",
    r"rlscale-sweep ": "tests/unit/cli/test_sweep.py",
    r"rlscale-buffer ": "tests/unit/cli/test_buffer.py",
    r"rlscale-serve ": "tests/integration/test_external.py",
    r"rlscale-data download ": "tests/unit/data/test_downloads.py",
    r"(printf .*)?rlscale-chat ": "tests/ranks/cli/test_chat.py",
    r"python app\.py": "tests/ranks/examples/test_hydra_app.py",
    # Composed with all checks of the configuration, up to the start of Ray. tests/docs_lines.py says which lines run.
    r"(RAY_ADDRESS=\S+ )?rlscale-train ": "tests/test_docs.py",
}
"""Patterns -> the file that executes such a command, as a program or as its function, with the sizes of the test."""

NOT_HERE = {
    r"(TORCH_INDEX_URL=.*|pip install .*|bin/install-sglang-cpu.*)": "downloads packages",
    r"(python -m venv verifiers-env|verifiers-env/bin/.*)": "needs packages of a second environment; "
    "tests/ranks/agents/test_verifiers_server.py runs the server",
    r"docker (build|pull) .*": "needs Docker and a network",
    r"(kubectl|sky|export RAY_AUTH_TOKEN=.*sky.*) ?.*": "needs a cluster and its account",
    r"export RAY_AUTH_TOKEN=.*": "makes the key of a cluster in a cloud",
    r"rlscale-launch kuberay --secret .*": "has ... where a reader writes names",
    r"(ray (start|status|job)|scancel).*": "needs a cluster",
    r"tensorboard .*": "serves a page until it is stopped",
    r"curl .*": "asks a server: tests/contract has its endpoints",
    r"python train\.py.*": "is slime's command, which the page translates",
    r"python producer\.py": "is the producer of a reader",
    r"touch .*": "asks a run for a memory snapshot",
    r"(bin/test|\.venv/bin/pre-commit|source \.venv/bin/activate &&) ?.*": "runs the tests themselves",
    r"'router\.middleware_paths=.*": "is an override without its command",
}
"""Patterns of the commands that no test executes -> the reason."""


def commands() -> list[str]:
    """Every line of a shell block, without comments and prompts, with its continuation lines."""
    found: dict[str, None] = {}
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
        for block in blocks(page, "console"):
            lines += [line[2:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
        # A comment starts behind two blanks at least; `#` within a value stays.
        found |= dict.fromkeys(re.sub(r"(^|\s{2,})#.*", "", line).strip() for line in lines)
    return [" ".join(line.split()) for line in found if line]


def matching(patterns: object, command: str) -> str | None:
    assert isinstance(patterns, tuple | dict)
    return next((pattern for pattern in patterns if re.match(pattern, command)), None)


def test_every_command_is_executed_or_has_a_reason() -> None:
    found = commands()
    unknown = [each for each in found if not any(matching(kind, each) for kind in (EXECUTED, BY_OTHER_TESTS, NOT_HERE))]
    assert len(found) > 100
    assert unknown == [], "execute it in this file, or add it to one of the tables"
    unused = [
        pattern
        for kind in (EXECUTED, BY_OTHER_TESTS, NOT_HERE)
        for pattern in kind
        if not any(re.match(pattern, each) for each in found)
    ]
    assert unused == [], "no page has such a command any more"
    assert [file for file in BY_OTHER_TESTS.values() if not (ROOT / file).is_file()] == []


def test_every_line_of_rlscale_train_runs_or_has_a_reason_why_not() -> None:
    tables = [("run", RUNS), ("by a test", BY_TESTS), ("composed", COMPOSED)]
    places = {
        line: [name for name, table in tables for pattern in table if re.fullmatch(pattern, line)] for line in lines()
    }
    assert {line: found for line, found in places.items() if len(found) != 1} == {}, "add it to tests/docs_lines.py"
    patterns = [pattern for _, table in tables for pattern in table]
    assert [each for each in patterns if not any(re.fullmatch(each, line) for line in places)] == []
    assert [file for file in BY_TESTS.values() if not (ROOT / file).is_file()] == []
    assert sum(found == ["composed"] for found in places.values()) < len(places) / 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the commands name: those of the pages, and a launch script of slime."""
    tutorials = ROOT / "docs" / "tutorial"
    for name, page in (
        ("my_reward.py", TUTORIAL),
        ("my_game.py", tutorials / "your-own-environment.md"),
        ("my_tools.py", tutorials / "your-own-tools.md"),
    ):
        (tmp_path / name).write_text(blocks(page, "python")[0])
    slime = ROOT / "tests" / "data" / "third_party" / "slime" / "624b824" / "scripts"
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    for file in ("run-qwen3-4B.sh", "models/qwen3-4B.sh"):
        shutil.copy(slime / file, tmp_path / "scripts" / file)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "again.yaml").write_text("# @package _global_\n# Mine\nrun:\n  name: again\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("command", [each for each in commands() if matching(EXECUTED, each)])
def test_a_cheap_command_does_what_it_says(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *argv = shlex.split(command, comments=True)
    code = MAINS[name](argv)
    output = capsys.readouterr()
    # An experiment without prompts is written, does not load yet, and says so with 1.
    assert code == (1 if "--dry-run" in argv else 0), output.err
    assert output.out
    if name == "rlscale-migrate" and "--dry-run" not in argv:
        assert (folder / "my_configs" / "experiment" / "qwen3_4b.yaml").is_file(), "which the next command names"
    if name == "rlscale-config":
        assert list((folder / "mine" / "schema").glob("*.json"))


def test_the_page_of_recipes_has_every_recipe_once() -> None:
    page = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
    named = re.findall(r"experiment=(\w+)`", page)
    recipes = [name for name in ConfigFolders.find().groups()["experiment"] if not name.endswith("_warmup")]
    assert sorted(named) == sorted(recipes)
    files = [f"docs/{file}" for file in re.findall(r"\]\(\.\./(images/\S+)\)", page)]
    files += [f"benchmarks/results/{file}" for file in re.findall(r"`(\w+\.md)`", page)]
    assert len(files) > 15 and [file for file in files if not (ROOT / file).is_file()] == []
