"""Loads scripts of `benchmarks/`, which import modules next to them."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def benchmark_script(name: str) -> Iterator[ModuleType]:
    """The script `<name>.py` as a module of another name, until the end of the block."""
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"{name}_script", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))
    for loaded in (spec.name, "machine"):
        del sys.modules[loaded]
