"""Every name of torch and transformers in the source tree exists in the versions that rlscale must work with."""

import importlib
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.library_names import find_used

ROOT = Path(__file__).parents[2]
RECORD: dict[str, dict[str, list[str] | bool]] = json.loads((ROOT / "tests/data/library_names.json").read_text())
SOURCE = ROOT / "src" / "rlscale"


def test_the_record_is_of_the_versions_of_a_gpu_machine() -> None:
    assert list(RECORD) == ["torch 2.11.0", "transformers 5.17.0"]


@cache
def used_names(library: str) -> dict[str, set[str]]:
    """The names of a library in the source tree, with the keywords of their calls. Read-only."""
    return find_used(SOURCE, (library,))


# Of transformers rlscale calls classes only, whose parameters are not recorded.
@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch 2.11.0"])
def test_keywords_exist_in_the_other_version(library: str) -> None:
    known = RECORD[library]
    given = {name: keywords for name, keywords in used_names(library.split()[0]).items() if keywords}
    compared = {name: set(parameters) for name in given if isinstance(parameters := known.get(name), list)}
    assert len(compared) >= 5
    for name, parameters in compared.items():
        assert given[name] <= parameters, f"{name} of {library} has no {given[name] - parameters}"


@pytest.mark.slow
@pytest.mark.parametrize("library", sorted(RECORD))
def test_every_used_name_exists_in_the_other_version(library: str) -> None:
    """A new name: run scripts/record_library_names.py, which needs the wheels and lists names that they lack."""
    missing = used_names(library.split()[0]).keys() - RECORD[library].keys()
    assert not missing, f"{library} lacks these, or they were not recorded: {', '.join(sorted(missing))}"


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_every_used_name_exists_in_the_installed_version(library: str) -> None:
    assert len(used_names(library)) >= 30
    for name, keywords in used_names(library).items():
        found = resolve(name)
        if inspect.isfunction(found) and keywords:
            parameters = inspect.signature(found).parameters
            takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
            assert takes_any or keywords <= set(parameters), f"{name} has no {keywords - set(parameters)}"


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        # A package may hide a module behind a function of the same name, or delete it.
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:i]))
    return found


def test_names_and_keywords_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch.nn import attention as att\n"
        "def f(x):\n    from transformers import AutoConfig  # late\n"
        "    torch.ops.aten.mm(x)\n    return F.pad(x, pad=(1,), mode='a', **x), att.varlen.run, AutoConfig.of(x)\n"
    )
    assert find_used(tmp_path, ("torch",)) == {
        "torch": set(),
        "torch.ops": set(),
        "torch.nn.functional": set(),
        "torch.nn.functional.pad": {"pad", "mode"},
        "torch.nn.attention": set(),
        "torch.nn.attention.varlen": set(),
        "torch.nn.attention.varlen.run": set(),
    }
    assert find_used(tmp_path, ("transformers",)) == {
        "transformers.AutoConfig": set(),
        "transformers.AutoConfig.of": set(),
    }
