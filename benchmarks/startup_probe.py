"""Runs `rlscale-train` with the given overrides and records the times of its parts. Started by `startup.py` and
`first_rollout.py`.

    STARTUP_BEGAN=<time.time() of the command> STARTUP_OUTPUT=spans.json python startup_probe.py +experiment=...

Times are taken around the driver's own calls, so that the run is the one that users get. `spans.cpu.json` has the CPU
seconds of the command's process at the begin and the end of each part.
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
CPU_SPANS: dict[str, tuple[float, float]] = {}

CALLS = (
    ("start Ray", "rlscale.cluster.ray_session", "_start"),
    ("read tokenizer and data", "rlscale.driver.prepared_run", "prepare_run"),
    ("trainer ready", "rlscale.cluster.ray_trainers", "RayTrainers.setup"),
    ("engine ready", "rlscale.cluster.ray_engines", "RayEngines.start"),
    ("connect", "rlscale.cluster.ray_trainers", "RayTrainers.connect"),
    ("first weight sync", "rlscale.cluster.ray_trainers", "RayTrainers.sync_weights"),
    ("first evaluation", "rlscale.evaluation.evaluator", "Evaluator.run"),
    ("first rollout", "rlscale.control.producer", "Producer.next"),
    ("first request", "rlscale.engines.client.http_engine", "HttpEngine.generate"),
    ("first training step", "rlscale.cluster.ray_trainers", "RayTrainers.train"),
    # The names of the revision that `startup.py` compares with.
    ("start Ray", "rlscale.cluster.session", "_start"),
    ("read tokenizer and data", "rlscale.trainer", "plan_run"),
    ("trainer ready", "rlscale.cluster.trainers", "RayTrainers.setup"),
    ("engine ready", "rlscale.cluster.engines", "RayEngines.start"),
    ("connect", "rlscale.cluster.trainers", "RayTrainers.connect"),
    ("first weight sync", "rlscale.cluster.trainers", "RayTrainers.sync_weights"),
    ("first training step", "rlscale.cluster.trainers", "RayTrainers.train"),
)
"""Parts, each with the driver's function that it times. A function that a revision lacks is skipped."""


def since() -> tuple[float, float]:
    """Seconds since the command, and CPU seconds of this process."""
    return time.time() - BEGAN, time.process_time()


def record(name: str, began: tuple[float, float]) -> None:
    output, ended = Path(os.environ["STARTUP_OUTPUT"]), since()
    for found, i, file in ((SPANS, 0, output), (CPU_SPANS, 1, output.with_suffix(".cpu.json"))):
        found.setdefault(name, (began[i], ended[i]))
        file.write_text(json.dumps(found))


def watch(name: str, module: str, path: str) -> None:
    """Times the first call of a function or method, plain or asynchronous."""
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def call(*args, **kwargs):
        began = since()
        result = original(*args, **kwargs)
        record(name, began)
        return result

    @functools.wraps(original)
    async def call_async(*args, **kwargs):
        began = since()
        result = await original(*args, **kwargs)
        record(name, began)
        return result

    setattr(owner, attribute, call_async if inspect.iscoroutinefunction(original) else call)


def import_driver(composed: tuple[float, float]) -> None:
    """Imports the driver and watches its calls."""
    record("compose and check the config", composed)
    began = since()
    try:
        importlib.import_module("rlscale.driver.trainer")
    except ImportError:
        importlib.import_module("rlscale.trainer")
    record("import the driver", began)
    for entry in CALLS:
        with contextlib.suppress(AttributeError, ImportError):
            watch(*entry)


def main() -> None:
    from rlscale.cli import train
    from rlscale.cli.app import main_train

    record("start Python and the command", (0.0, 0.0))
    composed = since()

    def make_job(config):
        import_driver(composed)
        return train.make_trainer(config)

    def run_job(config):
        import_driver(composed)
        return train.run_training(config)

    def check_run(config, broken):
        began = since()
        problems = train.check_run(config, broken)
        record("check packages and files", began)
        return problems

    is_earlier = "run_job" in inspect.signature(main_train).parameters
    job = {"run_job": run_job} if is_earlier else {"make_job": make_job}
    if hasattr(train, "check_run"):
        job["check_job"] = check_run
    sys.exit(main_train(sys.argv[1:], report=lambda config, result: None, **job))


if __name__ == "__main__":
    main()
