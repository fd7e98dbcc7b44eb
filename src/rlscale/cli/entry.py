"""Entry points of the commands that people wait for, and of those that start Ray: imports without garbage collection.

Modules live as long as the process. The collector would look through them several times while they are imported, a
tenth of the time of `rlscale-train --cfg job`, and again in every collection of the run.
"""

import gc
from importlib import import_module
from types import ModuleType

from rlscale.control.left_calls import exit_process


def train() -> None:
    """`rlscale-train`."""
    _module_of("train").main()


def plan() -> int:
    """`rlscale-plan`; returns the exit code."""
    code: int = _module_of("plan").main()
    return code


def config() -> int:
    """`rlscale-config`; returns the exit code."""
    code: int = _module_of("config").main()
    return code


def evaluate() -> None:
    """`rlscale-eval`."""
    module = _module_of("eval")
    exit_process(module.main())


def sweep() -> None:
    """`rlscale-sweep`."""
    module = _module_of("sweep")
    exit_process(module.main())


def _module_of(command: str) -> ModuleType:
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"rlscale.cli.{command}")
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
