"""Runs of the real command in a separate process, with a model cache and a run folder for each test.

Runs attach to one Ray per worker of pytest (`shared_ray`). A test that kills processes, or tests how Ray starts and
ends, has the mark `own_ray`: its runs start Ray themselves.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.store_starts import START_FOLDER
from tests.integration.ray_head import ray_head

MARK = "RLSCALE_TEST_MARK"
LEFT_OVER_S = 20

SMALL = (
    "data.num_rollout=3",
    "batch.rollout_batch_size=4",
    "batch.n_samples_per_prompt=4",
    "eval.max_examples=8",
    "eval.interval=2",
    "eval.stop_reward=null",
    "model.warmup_experiment=null",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
)
"""The quickstart, small enough for a test."""

REWARDED = "reward.type=random"
"""A reward other than 0: the random model is never right, so every loss and gradient would be 0."""


@dataclass(kw_only=True)
class Command:
    """Starts `rlscale-train` with a mark in the environment, by which all of its processes are found."""

    folder: Path
    cache: Path
    name: str = "run"
    ray: str | None = None  # address of a Ray to attach to; None: the run starts one
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    def environment(self) -> dict[str, str]:
        """Environment of the command: its mark, its cache, and the Ray to attach to."""
        env = {**os.environ, MARK: self.mark, "RLSCALE_CACHE": str(self.cache), "RAY_DEDUP_LOGS": "0"}
        if self.ray is not None:
            # Workers of a running Ray inherit its environment; the job config sets theirs.
            marked = {"runtime_env": {"env_vars": {MARK: self.mark}}}
            env |= {"RAY_ADDRESS": self.ray, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(marked)}
        return env

    def start(self, *overrides: str, small: bool = True, own_group: bool = False) -> subprocess.Popen[str]:
        given = (*(SMALL if small else ()), f"run.dir={self.run_dir}", *overrides)
        env = self.environment()
        return subprocess.Popen(
            [sys.executable, "-m", "rlscale.cli.train", *given],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0 if own_group else None,
        )

    def run(self, *overrides: str, small: bool = True, timeout_s: float = 240) -> "Finished":
        process = self.start(*overrides, small=small)
        out, err = process.communicate(timeout=timeout_s)
        return Finished(code=process.returncode, out=out, err=err)

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def describe(self) -> str:
        """Running processes and the ends of the logs, for the message of a failed test."""
        logs = [file for file in sorted(self.run_dir.rglob("*.log")) if file.is_file()]
        ends = [f"{file.relative_to(self.run_dir)}:\n{file.read_text(errors='replace')[-3000:]}" for file in logs]
        running = [f"{pid} {words[:160]}" for pid, words in sorted(self.processes().items())]
        return "\n".join(["running processes:", *running, *ends])

    def processes(self) -> dict[int, str]:
        """Running processes that have the mark: id -> command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended during the search
            if marked and words:
                found[int(folder.name)] = words
        return found

    def left_over(self) -> dict[int, str]:
        """Processes that outlive the command. A shared Ray ends its workers shortly after the command."""
        deadline_s = time.monotonic() + (LEFT_OVER_S if self.ray is not None else 0)
        while (found := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found

    def kill(self) -> None:
        """Kills the processes that a failed test left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of built models, shared by the tests of a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the Ray to which the runs of this worker attach."""
    with ray_head(tmp_path_factory.mktemp("ray") / "ray.log", num_cpus=8, num_slots=64) as address:
        yield address


def run_once(command: Command, *overrides: str, small: bool = True) -> None:
    """Runs the command unless a worker of this session has done so; a second worker waits for the first."""
    with command.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (command.run_dir / "finished.json").exists():
            command.folder.mkdir(exist_ok=True)
            done = command.run(*overrides, small=small)
            assert done.code == 0, done.err
            (command.folder / "out.txt").write_text(done.out)


@pytest.fixture(scope="session")
def plain(shared: Path, cache: Path, testrun_uid: str, shared_ray: str) -> Command:
    """The small run with `REWARDED`, on one rank and one engine; its output is in `out.txt`. Read-only."""
    command = Command(folder=shared / "plain", cache=cache, mark=f"plain-{testrun_uid}", ray=shared_ray)
    run_once(command, REWARDED)
    return command


@pytest.fixture(scope="session")
def warm() -> Path:
    """The model of the quickstart after its supervised warm-up, for `checkpoint.load`. `bin/quickstart` trains it."""
    return START_FOLDER / "quickstart_warmup"


@pytest.fixture
def command(tmp_path: Path, cache: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    own_ray = request.node.get_closest_marker("own_ray") is not None
    command = Command(folder=tmp_path, cache=cache, ray=None if own_ray else request.getfixturevalue("shared_ray"))
    yield command
    command.kill()
