"""`import rlscale.algo` in a fresh interpreter loads torch, and nothing of the config, pydantic or Hydra."""

import subprocess
import sys

PROGRAM = """
import sys
import rlscale.algo

assert "torch" in sys.modules
unwanted = ("pydantic", "pydantic_core", "hydra", "omegaconf", "ray", "transformers", "rlscale.config")
found = sorted(name for name in sys.modules if name.split(".")[0] in unwanted or name.startswith("rlscale.config"))
assert not found, found
layers = sorted({name.split(".")[1] for name in sys.modules if name.startswith("rlscale.")})
assert layers == ["algo", "expert_routes", "types"], layers
"""


def test_algo_stands_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
