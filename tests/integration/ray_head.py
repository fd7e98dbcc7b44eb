"""A Ray head that is started before the command."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 90


@contextmanager
def ray_head(log: Path, *, num_cpus: int, num_slots: int = 0) -> Iterator[str]:
    """Starts a Ray head in a separate process group and yields its address.

    Args:
        num_slots: units of the resource that stands for a GPU; 0: none, and one CPU stands for a GPU.

    Only runs with its address find it, unless RAY_TMPDIR is set for both.
    """
    # Not in pytest's folder: paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, log.open("w") as file:
        options = ["--head", "--port=0", f"--num-cpus={num_cpus}", "--num-gpus=0", "--block"]
        options += [] if "RAY_TMPDIR" in os.environ else [f"--temp-dir={folder}"]
        options += ["--include-dashboard=false"]
        options += [f'--resources={{"rlscale_slot": {num_slots}}}'] if num_slots else []
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + START_S
            found = None
            while found is None and process.poll() is None and time.monotonic() < deadline_s:
                found = re.search(r"ray start --address='([\d.:]+)'", log.read_text())
                time.sleep(0.1)
            assert found, log.read_text()
            yield found[1]
            assert process.poll() is None, "runs must leave Ray alive"
        finally:
            process.terminate()
            process.wait(timeout=60)
