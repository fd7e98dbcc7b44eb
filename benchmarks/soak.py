"""Measures whether the processes of a run grow during 20,000 steps.

Runs the quickstart with a tiny model and batch, so that a step takes as little time as possible: staleness 1, a dynamic
filter, over-sampling, partial rollouts, rewards in their own processes, and an evaluation every 50 steps during the
training. Every few seconds it reads the anonymous memory (RssAnon) of every process of the run. A growth is that of the
median over the last tenth of the steps after the warm-up, compared with the first tenth of them. Processes of ours must
not grow by more than 2 %; Ray's own processes are shown as well (its GCS keeps the events of up to
100,000 finished tasks).

The run folder is temporary. Its logs keep few samples, few timelines and the last evaluations and checkpoint; a run
whose folder exceeds 1 GB is ended. Ctrl-C and SIGTERM end the run, and the results so far are written. The exit code is
1 if the limit does not hold or not all steps were run. Writes `results/soak.md` and `.json`, with `--agents`
`results/soak_agents.md` and `.json`.

A trainer on a CPU keeps freed memory, so that its RssAnon is the most that it ever needed, and grows by steps. With
`--snapshots` driver and trainer also count the bytes in use, at the warm-up and near the end: a leak is in these, too.
The verdict is that of RssAnon in any case.

    python benchmarks/soak.py [--agents] [--steps 20000] [--warmup 2000] [--seconds S] [--snapshots] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from machine import machine, sentence
from soak_growth import LIMIT, MemorySample, describe_process, find_faults, growth_table, growths, part_table

from rlscale.crashtest.victims import MARK, processes
from rlscale.observe.memory_request import REQUEST_FILE
from rlscale.rehearsal.memory_sampler import anonymous_bytes

RESULTS = Path(__file__).parent / "results"
MAX_FOLDER_BYTES = 10**9
WRITE_INTERVAL_S = 60.0
END_TIMEOUT_S = 60.0
MAX_STORED = 500  # samples in the results
LOG_LINES = 15

# A reward that nothing can learn, so that the filter drops about one group in eight during the whole run.
REWARD = """
import random

def draw(sample):
    return float(random.Random(sample.seed).random() < 0.5)
"""
# Without a client's library: its connections would be a part of the driver's memory.
AGENT = """
import json, random, urllib.request

def agent(task, session):
    messages = list(task.messages)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"}
    for _ in range(3):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 6}).encode()
        request = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            messages += [json.load(response)["choices"][0]["message"], {"role": "user", "content": "1+1="}]
    return float(random.Random(task.seed).random() < 0.5)
"""
PLAIN_OVERRIDES = (
    "rollout.max_response_len=12",
    "sampling.partial_rollout=true",
    "sampling.over_sampling_batch_size=4",
    "algo.dynamic_sampling=true",
    "reward.custom_path=soak_reward:draw",
    "reward.max_workers=2",
)
AGENT_OVERRIDES = ("rollout.max_response_len=24", "agent.function_path=soak_agent:agent", "agent.keep_logs=16")
AGENT_TEXT = """Measures whether the processes of a run with agents grow.

Runs the quickstart with a tiny model, batch and staleness 1. Each of the 8 trajectories of a step is a session of the
gateway, in which a function makes three requests: 24 requests a step, and evaluations. Memory and growth are as in
`soak.md`; the gateway is a process of ours, too."""
OVERRIDES = (
    "batch.rollout_batch_size=2",
    "batch.n_samples_per_prompt=4",
    "rollout.max_staleness=1",
    # The lengths of responses must not drift: the growth is that of the loop.
    "optim.lr=1e-6",
    "eval.interval=50",
    "eval.max_examples=4",
    "eval.stop_reward=null",
    "eval.keep_last=2",
    "model.warmup_experiment=null",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "checkpoint.save_interval=100",
    "checkpoint.keep_last=1",
    "logging.num_samples=1",
    "logging.num_timelines=4",
    "logging.console=plain",
)


@dataclass(kw_only=True)
class Soak:
    """State of one run under measurement."""

    folder: Path
    num_steps: int
    has_agents: bool = False
    samples: list[MemorySample] = field(default_factory=list)
    ended: str = ""  # why it ended before its last step
    seconds: float = 0.0
    bytes_by_file: dict[str, int] = field(default_factory=dict)
    snapshots_due: list[int] = field(default_factory=list)  # steps of the requests to come

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"


class StepCounter:
    """Reads the step of the newest record of a growing metrics file. It keeps no earlier records."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._steps = path, 0, 0

    def read(self) -> int:
        """Number of steps so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the driver is writing it
                self._position += len(line)
                record = json.loads(line)
                # An evaluation has a separate record.
                if "train/loss" in record:
                    self._steps = max(self._steps, record["step"] + 1)
        return self._steps


class ProcessNames:
    """Names of processes: their part, with a number if there are several."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._names: dict[tuple[int, str], str] = {}

    def name(self, pid: int, command: str) -> str:
        """Name of a process, the same in every sample."""
        part = describe_process(pid, command, driver=self._driver)
        if (pid, part) not in self._names:
            number = 1 + sum(known == part for _, known in self._names)
            self._names[pid, part] = part if number == 1 else f"{part} {number}"
        return self._names[pid, part]


def command_of(soak: Soak) -> list[str]:
    places = (f"run.dir={soak.run_dir}", f"data.num_rollout={soak.num_steps}")
    kind = AGENT_OVERRIDES if soak.has_agents else PLAIN_OVERRIDES
    return [sys.executable, "-m", "rlscale.cli.train", "+experiment=quickstart", *OVERRIDES, *kind, *places]


def run(soak: Soak, options: argparse.Namespace) -> None:
    """Runs the command and samples it until it ends, a bound is reached or this process is interrupted."""
    (soak.folder / "soak_reward.py").write_text(REWARD)
    (soak.folder / "soak_agent.py").write_text(AGENT)
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    with soak.log.open("wb") as log:
        driver = subprocess.Popen(command_of(soak), cwd=soak.folder, env=env, stdout=log, stderr=log)
    try:
        watch(soak, driver, mark, options)
    except KeyboardInterrupt:
        soak.ended = "it was interrupted"
    finally:
        end(driver)
    if driver.returncode != 0 and not soak.ended:
        tail = soak.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        soak.ended = "the command failed:\n" + "\n".join(tail)


def watch(soak: Soak, driver: subprocess.Popen[bytes], mark: str, options: argparse.Namespace) -> None:
    began, written = time.monotonic(), time.monotonic()
    steps, names = StepCounter(soak.run_dir / "metrics.jsonl"), ProcessNames(driver.pid)
    while driver.poll() is None:
        now = time.monotonic()
        soak.seconds = now - began
        count = steps.read()
        if soak.snapshots_due and count >= soak.snapshots_due[0]:
            soak.snapshots_due.pop(0)
            (soak.run_dir / REQUEST_FILE).touch()
        # The export at the end belongs to no step.
        if 0 < count < soak.num_steps:
            found = {names.name(pid, command): anonymous_bytes(pid) for pid, command in processes(mark).items()}
            alive = {name: number for name, number in found.items() if number}
            soak.samples.append(MemorySample(seconds=soak.seconds, steps=count, memory=alive))
            if len(soak.samples) == 1:
                progress(soak)
        if now - written > WRITE_INTERVAL_S:
            written = now
            soak.bytes_by_file = folder_bytes(soak.run_dir)
            write(soak, options)
            progress(soak)
            if sum(soak.bytes_by_file.values()) > MAX_FOLDER_BYTES:
                soak.ended = "its folder exceeded 1 GB"
                return
        if options.seconds is not None and soak.seconds > options.seconds:
            soak.ended = f"it reached the bound of {options.seconds:g} s"
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(options.interval)


def progress(soak: Soak) -> None:
    steps = soak.samples[-1].steps if soak.samples else 0
    sys.stderr.write(f"soak.py: {steps:,} of {soak.num_steps:,} steps after {soak.seconds:.0f} s\n")
    sys.stderr.flush()


def end(driver: subprocess.Popen[bytes]) -> None:
    """Ends a command that still runs, as Ctrl-C does; kills it if that takes too long."""
    if driver.poll() is None:
        driver.send_signal(signal.SIGINT)
        try:
            driver.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def folder_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each file and folder directly in a folder."""
    return {path.name: sum(_size(each) for each in (path, *path.rglob("*"))) for path in sorted(folder.glob("*"))}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0  # an old checkpoint that was just removed


def bytes_in_use(folder: Path) -> dict[str, list[int]]:
    """Bytes in use and bytes kept by the allocator at each snapshot, by process; empty without snapshots."""
    found: dict[str, list[int]] = {}
    for name, pattern in (("driver", "memory_*_driver.json"), ("trainer rank", "memory_*_rank_0.json")):
        reports = [json.loads(file.read_text()) for file in sorted(folder.glob(pattern))]
        if reports and "allocated_bytes" in reports[0]:
            found[f"{name}, in use"] = [each["allocated_bytes"] for each in reports]
            found[f"{name}, kept"] = [each["freed_bytes"] for each in reports]
    return found


def summarise(soak: Soak, warmup: int) -> dict[str, Any]:
    found = growths(soak.samples, warmup=warmup)
    faults = find_faults(found)
    return {
        "steps": soak.samples[-1].steps if soak.samples else 0,
        "planned_steps": soak.num_steps,
        "warmup": warmup,
        "seconds": soak.seconds,
        "ended": soak.ended,
        "growth": {each.name: {"first": each.first, "last": each.last, "share": each.share} for each in found},
        "faults": faults,
        "passed": not faults and not soak.ended,
        "bytes_by_file": soak.bytes_by_file,
        "bytes_in_use": bytes_in_use(soak.folder),
    }


def report(soak: Soak, summary: dict[str, Any], load: float) -> str:
    found = growths(soak.samples, warmup=summary["warmup"])
    ours = [each.name for each in found if each.is_ours]
    if summary["faults"]:
        verdict = f"Failed: {'; '.join(summary['faults'])}."
    elif soak.ended:
        verdict = f"Incomplete: no process of ours grew by more than {LIMIT:.0%} so far."
    else:
        verdict = f"Passed: no process of ours grew by more than {LIMIT:.0%}."
    ended = f" The run did not reach its last step: {soak.ended}." if soak.ended else ""
    files = ", ".join(f"{name} {number / 1e6:.1f} MB" for name, number in summary["bytes_by_file"].items())
    in_use = "; ".join(
        f"{name} {' -> '.join(f'{number / 1e6:.1f}' for number in numbers)} MB"
        for name, numbers in summary["bytes_in_use"].items()
    )
    snapshots = f"\n\nSnapshots of the allocator: {in_use}." if in_use else ""
    rate = summary["steps"] / soak.seconds if soak.seconds else 0.0
    text = AGENT_TEXT if soak.has_agents else (__doc__ or "").split("The run folder")[0].strip()
    option = " --agents" if soak.has_agents else ""
    origin = f"Made by `python benchmarks/soak.py{option}`."
    return (
        f"# Memory of a long run\n\n{text}\n\n{sentence([load])} "
        f"{summary['steps']:,} of {soak.num_steps:,} steps in {soak.seconds:,.0f} s ({rate:.1f} steps/s); "
        f"warm-up {summary['warmup']:,} steps; {len(soak.samples):,} samples. {origin}\n\n"
        f"{verdict}{ended}\n\n{growth_table(found)}\n\nOver the run (median of the samples of each tenth):\n\n"
        f"{part_table(soak.samples, ours)}\n\nRun folder at the end: {files or 'not measured'}.{snapshots}\n"
    )


def write(soak: Soak, options: argparse.Namespace) -> str:
    """Writes the results so far, unless `--dry`. Returns the page."""
    summary = summarise(soak, options.warmup)
    text = report(soak, summary, options.load)
    if not options.dry:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "soak_agents" if soak.has_agents else "soak"
        (options.out / f"{name}.md").write_text(text)
        every = 1 + len(soak.samples) // MAX_STORED
        samples = [asdict(sample) for sample in soak.samples[::every]]
        content = {"machine": machine(), "load": options.load, "summary": summary, "samples": samples}
        (options.out / f"{name}.json").write_text(json.dumps(content) + "\n")
    return text


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Lets SIGTERM end this process as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", action="store_true", help="trajectories of agents that know a URL")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=2000, help="steps before the first window")
    parser.add_argument("--seconds", type=float, default=None, help="end the run after this time")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--snapshots", action="store_true", help="count bytes in use at the warm-up and near the end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="writes no results")
    options = parser.parse_args(argv)
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup must be less than --steps ({options.steps}), got {options.warmup}")
    options.load = os.getloadavg()[0]
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="soak-") as name, interrupts():
        soak = Soak(folder=Path(name), num_steps=options.steps, has_agents=options.agents)
        soak.snapshots_due = [options.warmup, options.steps - options.steps // 50] if options.snapshots else []
        run(soak, options)
        soak.bytes_by_file = folder_bytes(soak.run_dir)
    sys.stdout.write(write(soak, options))
    return 0 if summarise(soak, options.warmup)["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
