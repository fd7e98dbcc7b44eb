"""Signals of a real Slurm to the job of `rlscale-launch slurm`: it is requeued and started again, and leaves nothing.

Ray and the run are replaced by scripts that print the signals they get; tests/cluster/test_slurm.py has the real ones.
"""

import re
import sys
import time
from pathlib import Path

import pytest

from rlscale.launch.node_needs import NodeNeeds
from rlscale.launch.options import SlurmOptions
from rlscale.launch.slurm import write_slurm
from tests.cluster.slurm_cluster import SlurmCluster, missing
from tests.unit.launch.jobs import make_job

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(300)]

NEEDS = NodeNeeds(num_nodes=2, gpus=0, cpus=2, memory_gib=4, is_whole=False, slots=1)
PROGRAMS = {
    "ray": 'touch_folder() { for w in "$@"; do [[ $w == --temp-dir=* ]] && mkdir -p "${w#*=}"; done; }\n'
    'touch_folder "$@"\necho "ray on $SLURMD_NODENAME"\nexec sleep 600\n',
    "python": f'if [[ $1 == -m ]]; then exit 0; fi\nexec {sys.executable} "$@"\n',
    "rlscale-train": """
echo "start $((${SLURM_RESTART_COUNT:-0} + 1)) of the run"
if [[ ${SLURM_RESTART_COUNT:-0} != 0 ]]; then exit 0; fi
trap 'echo "SIGTERM arrives"; exit 130' TERM
trap 'echo "SIGUSR1 arrives"; exit 130' USR1
while true; do sleep 0.2 & wait $!; done
""",
}


@pytest.fixture
def job(slurm: SlurmCluster, tmp_path: Path) -> tuple[int, Path]:
    """The number of a job whose run has started, and its log."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    setup = [f"export PATH={tmp_path / 'bin'}:$PATH"]
    options = SlurmOptions(workdir=str(tmp_path), interface="lo", setup=setup, time="30:00", join_timeout=30)
    file = tmp_path / "job.sbatch"
    file.write_text(write_slurm(make_job(needs=NEEDS, name="job"), options))
    found = re.search(r"job (\d+)", slurm.run("sbatch", str(file)))
    assert found
    log = tmp_path / f"job-{found[1]}.log"
    end_s = time.monotonic() + 60
    while not log.exists() or "start 1 of the run" not in log.read_text():
        assert time.monotonic() < end_s, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)
    return int(found[1]), log


def wait_for_state(slurm: SlurmCluster, number: int, log: Path, state: str) -> dict[str, str]:
    return slurm.wait_for(number, lambda job: job["JobState"] == state, timeout_s=90, log=log)


def test_the_signal_before_the_time_limit_reaches_the_run_and_requeues_the_job(
    slurm: SlurmCluster, job: tuple[int, Path]
) -> None:
    number, log = job
    slurm.run("scancel", "--batch", "--signal=USR1", str(number))
    slurm.restart_soon(number, log=log)
    assert not Path(f"/tmp/ray-{number}").exists()
    found = wait_for_state(slurm, number, log, "COMPLETED")
    assert (found["ExitCode"], found["Restarts"]) == ("0:0", "1")
    text = log.read_text()
    assert text.count("SIGUSR1 arrives") == 1 and "SIGTERM arrives" not in text
    assert f"job {number} is requeued and resumes" in text
    assert "start 2 of the run" in text
    assert slurm.processes(number) == []


def test_a_cancelled_job_leaves_nothing_and_can_be_requeued(slurm: SlurmCluster, job: tuple[int, Path]) -> None:
    number, log = job
    slurm.run("scancel", str(number))
    wait_for_state(slurm, number, log, "CANCELLED")
    end_s = time.monotonic() + 30
    while left := slurm.processes(number):
        assert time.monotonic() < end_s, left
        time.sleep(0.1)
    assert "SIGTERM arrives" in log.read_text()
    assert not Path(f"/tmp/ray-{number}").exists()
    assert "is requeued" not in log.read_text()
    slurm.run("scontrol", "requeue", str(number))
    slurm.restart_soon(number, log=log)
    assert wait_for_state(slurm, number, log, "COMPLETED")["ExitCode"] == "0:0"
    assert "start 2 of the run" in log.read_text()
