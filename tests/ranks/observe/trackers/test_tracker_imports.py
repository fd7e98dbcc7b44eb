"""Trackers in an interpreter without their libraries, and the imports of a run without trackers."""

import subprocess
import sys


def test_a_missing_package_is_named_with_its_extra() -> None:
    """The interpreter finds neither package."""
    code = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("wandb", "tensorboard") else PathFinder.find_spec(name, path, target)
sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
from rlscale.config import LoggingConfig, TensorboardConfig, WandbConfig
from rlscale.observe.trackers.check_trackers import check_trackers
config = LoggingConfig(wandb=WandbConfig(enabled=True), tensorboard=TensorboardConfig(enabled=True))
sys.stdout.writelines(f"{problem}\\n" for problem in check_trackers(config))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "logging.tensorboard.enabled must be false if tensorboard is not installed, got true; install it: "
        "pip install 'rlscale[tensorboard]'",
        "logging.wandb.enabled must be false if wandb is not installed, got true; install it: "
        "pip install 'rlscale[wandb]'",
    ]


def test_a_run_without_trackers_imports_none_of_their_libraries() -> None:
    code = """
import sys
import rlscale.observe.reporter, rlscale.observe.trackers, rlscale.driver.trainer
found = sorted({"wandb", "tensorboard"} & sys.modules.keys())
sys.exit(str(found) if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
