"""Runs `rlscale-train` with the words given, and notes when what begins and ends. Started by `startup.py`.

    STARTUP_BEGAN=<time.time() of the command> STARTUP_OUTPUT=spans.json python startup_probe.py +experiment=...

Times are taken around the driver's own calls, so the run is the one that users get.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import time
from pathlib import Path

BEGAN = float(os.environ["STARTUP_BEGAN"])
SPANS: dict[str, tuple[float, float]] = {}

CALLS = (
    ("start Ray", "rlscale.cluster.ray_session", "_start"),
    ("read tokenizer and data", "rlscale.driver.trainer", "prepare_run"),
    ("start the trainer's process", "rlscale.cluster.ray_trainers", "RayTrainers.rendezvous"),
    ("trainer ready", "rlscale.cluster.ray_trainers", "RayTrainers.setup"),
    ("engine ready", "rlscale.cluster.ray_engines", "RayEngines.start"),
    ("connect", "rlscale.cluster.ray_trainers", "RayTrainers.connect"),
    ("first weight sync", "rlscale.cluster.ray_trainers", "RayTrainers.sync_weights"),
    ("first evaluation", "rlscale.evaluation.evaluator", "Evaluator.run"),
    ("first rollout", "rlscale.control.producer", "Producer.next"),
    ("first training step", "rlscale.cluster.ray_trainers", "RayTrainers.train"),
)
"""Name of a part, and the driver's function that it is."""


def since() -> float:
    return time.time() - BEGAN


def note(name: str, began: float) -> None:
    SPANS.setdefault(name, (began, since()))
    Path(os.environ["STARTUP_OUTPUT"]).write_text(json.dumps(SPANS))


def watch(name: str, module: str, path: str) -> None:
    """Times the first call of a function or method, plain or asynchronous."""
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def call(*args, **kwargs):
        began = since()
        result = original(*args, **kwargs)
        note(name, began)
        return result

    @functools.wraps(original)
    async def call_async(*args, **kwargs):
        began = since()
        result = await original(*args, **kwargs)
        note(name, began)
        return result

    setattr(owner, attribute, call_async if inspect.iscoroutinefunction(original) else call)


def main() -> None:
    from rlscale.cli import train
    from rlscale.cli.app import main_train

    note("Python and the command line", 0.0)
    composed = since()

    def make_job(config):
        note("compose and check the config", composed)
        began = since()
        importlib.import_module("rlscale.driver.trainer")
        note("import the driver", began)
        for entry in CALLS:
            with contextlib.suppress(AttributeError, ImportError):  # a part that this version does not have
                watch(*entry)
        return train.make_trainer(config)

    sys.exit(main_train(sys.argv[1:], make_job=make_job, report=lambda config, result: None))


if __name__ == "__main__":
    main()
