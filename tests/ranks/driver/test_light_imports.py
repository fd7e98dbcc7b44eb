"""Imports of driver, worker and engine, each in its own process: heavy packages would delay the start of a run."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rlscale.driver.trainer", {"torch", "transformers"}),
        ("rlscale.worker", {"ray", "torch", "transformers"}),
        ("rlscale.cli.serve", {"hydra", "pydantic", "rlscale.config"}),
        ("rlscale.agents.verifiers_server", {"hydra", "numpy", "omegaconf", "ray", "torch"}),
    ],
)
def test_imports_are_light(module: str, absent: set[str]) -> None:
    code = f"""
import importlib, pkgutil, sys
module = importlib.import_module({module!r})
for each in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(each.name)
print(sorted({absent!r} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
