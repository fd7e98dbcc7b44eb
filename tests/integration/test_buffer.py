"""Runs that train on trajectories of the rollout buffer service, with the producer of the documentation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.buffer_process import BufferProcess
from tests.integration.conftest import Command

PAGE = Path(__file__).parents[2] / "docs/how-to/buffer-service.md"
SETTINGS = ("rollout.max_staleness=1", "eval.interval=null", "reward.type=null")


@contextmanager
def producer(service: BufferProcess, folder: Path) -> Iterator[None]:
    """The producer of the documentation."""
    code = re.search(r'```python title="producer.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert code is not None
    (folder / "producer.py").write_text(code[1])
    with (folder / "producer.log").open("w") as log:
        env = {**os.environ, "BUFFER_URL": service.url}
        process = subprocess.Popen([sys.executable, str(folder / "producer.py")], env=env, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (folder / "producer.log").read_text()
    finally:
        process.kill()
        process.wait()


def dumped(folder: Path, num_rollouts: int) -> list[dict[str, Any]]:
    files = [folder / f"{number}.jsonl" for number in range(num_rollouts)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_run_and_its_service_are_killed_and_no_trajectory_is_trained_twice(command: Command) -> None:
    with BufferProcess(command.folder) as service, producer(service, command.folder):
        overrides = (
            *SETTINGS,
            f"buffer.url={service.url}",
            "data.num_rollout=5",
            "checkpoint.save_interval=1",
            'debug.save_rollout_data="dumps/{rollout_id}.jsonl"',
        )
        run = command.start(*overrides)
        metrics = command.run_dir / "metrics.jsonl"
        while not metrics.exists() or len(command.metrics()) < 2:
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.1)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        service.kill()
        service.start()
        done = command.run(*overrides)
    assert done.code == 0, done.err
    assert "resuming from" in done.out
    samples = dumped(command.folder / "dumps", 5)
    ids = [sample["metadata"]["buffer"]["id"] for sample in samples]
    assert len(ids) == len(set(ids)) == 5 * 16
    assert {max(sample["weight_versions"]) for sample in samples} > {0}
    differences = [record["logprob_diff/max"] for record in command.metrics() if "logprob_diff/max" in record]
    assert differences and max(differences) < 1e-3, "trainer and engine agree on the tokens of the service"


def test_a_service_that_does_not_answer_is_refused_before_anything_starts(command: Command) -> None:
    done = command.run("buffer.url=http://127.0.0.1:9", *SETTINGS)
    assert done.code == 2
    assert "buffer.url must name a rollout buffer that answers, got http://127.0.0.1:9 (" in done.err
