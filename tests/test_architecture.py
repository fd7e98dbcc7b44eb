"""The source tree keeps its rules; and the rules find a breach of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import CONTENTS, EXCEPTIONS, PACKAGE, declared_distributions, find_violations

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / PACKAGE


def test_the_source_tree_keeps_its_rules() -> None:
    violations = find_violations(SOURCE, distributions=declared_distributions(ROOT / "pyproject.toml"))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files")
def test_no_tracked_file_has_an_unexpanded_home_in_its_path() -> None:
    """Code that forgets to expand `~` makes a folder of that name."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert len(tracked) > 1000
    assert [path for path in tracked if "~" in path] == []


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("part", "absent"),
    [
        ("errors", {"torch", "ray", "transformers", "pydantic"}),
        ("types", {"torch", "ray", "transformers", "pydantic"}),
        ("secrets", {"torch", "ray", "transformers", "pydantic"}),
        ("architectures", {"torch", "ray", "transformers", "pydantic", "numpy"}),
        ("protocols", {"torch", "ray", "transformers"}),
        ("hook_protocols", {"torch", "ray", "transformers"}),
        ("plugins", {"torch", "ray", "transformers"}),
        ("config", {"torch", "ray", "transformers"}),
        ("algo", {"ray", "transformers", "pydantic", "hydra", "omegaconf", "rlscale.config"}),
        ("plan", {"torch", "ray", "transformers"}),
        ("observe", {"torch", "ray", "transformers"}),
        ("control", {"torch", "ray"}),
        ("launch", {"torch", "ray", "transformers"}),
    ],
)
def test_light_parts_import_nothing_heavy(part: str, absent: set[str]) -> None:
    code = f"""
import importlib, pkgutil, sys
part = importlib.import_module("{PACKAGE}.{part}")
for module in pkgutil.walk_packages(getattr(part, "__path__", []), part.__name__ + "."):
    importlib.import_module(module.name)
loaded = sorted({absent!r} & sys.modules.keys())
sys.exit(f"{PACKAGE}.{part} imports {{loaded}}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60

PLANTED = [
    (
        "algo/a.py",
        "from rlscale.driver.trainer import Trainer",
        "algo/a.py: rlscale.driver.trainer: imported against the order",
    ),
    ("algo/a.py", "from rlscale import cluster", "algo/a.py: rlscale.cluster: imported against the order"),
    ("algo/a.py", "from ..data import batch", "algo/a.py: rlscale.data: imported against the order"),
    ("algo/a.py", "from .. import cluster", "algo/a.py: rlscale.cluster: imported against the order"),
    ("data/a.py", "import rlscale.observe.jsonl", "imported against the order data <- observe"),
    ("engines/a.py", "from rlscale.weights import x", "imported against the order engines <- weights"),
    ("control/a.py", "def f():\n    from rlscale.cluster import x  # why", "imported against the order control"),
    ("rollout/a.py", "if T:\n    from rlscale.engines import x", "imported against the order rollout <- engines"),
    ("shiny/a.py", "", "shiny/a.py: module: shiny has no place in the import order"),
    ("control/a.py", "import ray", "control/a.py: ray: imported outside of cluster"),
    ("cli/a.py", "from hydra import compose", "cli/a.py: hydra: imported outside of config/hydra"),
    ("config/a.py", "from hydra.types import RunMode", "config/a.py: hydra.types: imported outside of config/hydra"),
    ("config/inspect/a.py", "import hydra", "config/inspect/a.py: hydra: imported outside of config/hydra"),
    ("config/hydra_old/a.py", "import hydra", "config/hydra_old/a.py: hydra: imported outside of config/hydra"),
    ("cli/a.py", "import omegaconf", "cli/a.py: omegaconf: imported outside of config"),
    ("training/a.py", "import sglang.srt", "training/a.py: sglang.srt: imported outside of engines"),
    ("weights/a.py", "from megatron.core import x", "weights/a.py: megatron.core: imported outside of training"),
    ("data/a.py", "import flask", "data/a.py: flask: not a dependency"),
    ("data/a.py", "x = 1\n" * 500, "data/a.py: module: lines (502, at most 500)"),
    ("data/a.py", LONG_FUNCTION, "data/a.py: long: lines (61, at most 60)"),
    ("data/a.py", "async def f(self, a, b, /, c, d, *, e, g, h): ...", "data/a.py: f: parameters (7, at most 6)"),
    ("data/utils.py", "", "data/utils.py: utils: says nothing"),
    ("helpers/a.py", "", "helpers/a.py: helpers: says nothing"),
    ("data/a.py", "try:\n    x\nexcept:\n    raise", "data/a.py: line 4: bare except"),
    ("data/a.py", "try:\n    x\nexcept Exception:\n    pass", "data/a.py: line 4: swallows every exception"),
    ("data/a.py", "try:\n    x\nexcept (OSError, BaseException):\n    ...", "data/a.py: line 4: swallows"),
    ("data/a.py", "with contextlib.suppress(Exception):\n    x", "data/a.py: line 2: swallows every exception"),
    ("data/a.py", "print(1)", "data/a.py: line 2: print"),
    ("data/a.py", "def f():\n    import json", "data/a.py: f: imports inside a function without a reason"),
    ("data/a.py", "# why\ndef f():\n    import json", "data/a.py: f: imports inside a function without a reason"),
]


def plant(folder: Path, path: str, text: str) -> Path:
    """A package of one file, with a docstring."""
    package = folder / PACKAGE
    file = package / path
    file.parent.mkdir(parents=True)
    file.write_text(f'"""A docstring."""\n{text}\n')
    return package


@pytest.mark.parametrize(("path", "text", "breach"), PLANTED)
def test_a_planted_breach_is_found(tmp_path: Path, path: str, text: str, breach: str) -> None:
    package = plant(tmp_path, path, text)
    found = find_violations(package, exceptions={}, distributions=frozenset({"torch"}))
    assert [line for line in found if breach in line], found


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "data/a.py", "")
    (package / "data" / "a.py").write_text("x = 1\n")
    assert find_violations(package, exceptions={}) == ["data/a.py: module: has no docstring"]


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "training/__init__.py", "")
    for number in range(15):
        (package / "training" / f"a{number}.py").write_text('"""A docstring."""\n')
    assert find_violations(package, exceptions={}) == ["training: modules (15, at most 14)"]


def test_a_backend_without_a_module_of_the_other_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, "training/fsdp/step.py", "")
    for name in CONTENTS - {"critic"}:
        (package / "training" / "fsdp" / f"{name}.py").write_text('"""A docstring."""\n')
    assert find_violations(package, exceptions={}) == ["training/fsdp: has no critic, which the other backends have"]


CLEAN = """
import json
from rlscale.types import Prompt
from rlscale.data import b
def f(self, a, b, c, d, e, g):
    # Heavy and only needed here.
    import torch
    import torch.nn
    try:
        a.print()
    except OSError:
        pass
    except Exception as error:
        raise ValueError from error
"""


def test_a_clean_file_has_no_breach(tmp_path: Path) -> None:
    package = plant(tmp_path, "data/a.py", CLEAN)
    assert find_violations(package, exceptions={}, distributions=frozenset({"torch"})) == []


def test_an_exception_excuses_one_breach_and_must_be_needed(tmp_path: Path) -> None:
    package = plant(tmp_path, "data/a.py", "def f(a, b, c, d, e, g, h): ...\ndef k(a, b, c, d, e, g, h): ...")
    exceptions = {"data/a.py: f: parameters": "a reason", "data/a.py: gone: lines": "a reason"}
    assert find_violations(package, exceptions=exceptions) == [
        "data/a.py: k: parameters (7, at most 6)",
        "data/a.py: gone: lines: exception is not needed",
    ]
