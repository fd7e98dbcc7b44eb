"""A Slurm cluster on this machine: the real daemons of Debian's slurm-wlm and munge, in a separate folder.

Its nodes are several slurmd on one host. There are no cgroups: containers do not allow them.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlscale.engines.ports import free_port

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=3
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=15
MinJobAge=600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Reason why Slurm cannot run here; empty: it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if absent:
        return f"needs slurm-wlm and munge (apt-get install slurm-wlm munge); not found: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "needs root: slurmd starts jobs as their users"


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    """A running cluster."""

    folder: Path
    env: dict[str, str]  # of every command that talks to it

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """The fields of a job, e.g. JobState, ExitCode and Restarts."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def wait_for(
        self, number: int, condition: Callable[[dict[str, str]], bool], *, timeout_s: float, log: Path
    ) -> dict[str, str]:
        """Waits until the fields of a job meet the condition, and returns them."""
        end_s = time.monotonic() + timeout_s
        while not condition(found := self.job(number)):
            text = log.read_text() if log.exists() else "(no log)"
            assert time.monotonic() < end_s, f"job {number} is {found['JobState']} after {timeout_s} s:\n{text}"
            time.sleep(0.5)
        return found

    def restart_soon(self, number: int, *, log: Path) -> None:
        """Starts a requeued job soon. Slurm keeps it for two minutes, until its old credential has surely expired."""

        def is_pending(job: dict[str, str]) -> bool:
            return job["JobState"] == "PENDING" and not self.processes(number) and self.is_idle

        self.wait_for(number, is_pending, timeout_s=180, log=log)
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+8")

    @property
    def is_idle(self) -> bool:
        """Whether no node runs a job or still completes one."""
        return set(self.run("sinfo", "--noheader", "--Node", "--format=%T").split()) == {"idle"}

    def processes(self, number: int) -> list[str]:
        """Command lines of the living processes of a job."""
        mark, found = f"SLURM_JOB_ID={number}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return [line for line in found if line]


@contextmanager
def slurm_cluster(folder: Path, *, num_nodes: int, cpus: int) -> Iterator[SlurmCluster]:
    """Starts munged, slurmctld and a slurmd for each node, and ends all of them with their jobs.

    Args:
        folder: new; its path must be short, because sockets are in it.
        num_nodes: nodes n1, n2, ...
        cpus: of a node, whatever this machine has.
    """
    host = socket.gethostname().partition(".")[0]
    for name in ("state", *(f"spool-n{i + 1}" for i in range(num_nodes))):
        (folder / name).mkdir(parents=True)
    nodes = [
        f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port('127.0.0.1')} CPUs={cpus} "
        "RealMemory=64000"
        for i in range(num_nodes)
    ]
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, port=free_port("127.0.0.1"), folder=folder, nodes="\n".join(nodes)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    cluster = SlurmCluster(folder=folder, env={**os.environ, "PATH": path, "SLURM_CONF": str(config)})
    munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in _MUNGE_FILES.items()]
    with ExitStack() as stack:
        for name, command in (
            ("munged", ["munged", "--foreground", "--force", "--num-threads=2", *munge]),
            ("slurmctld", ["slurmctld", "-D", "-f", str(config)]),
            *((f"slurmd-n{i + 1}", ["slurmd", "-D", "-N", f"n{i + 1}", "-f", str(config)]) for i in range(num_nodes)),
        ):
            stack.enter_context(_daemon(cluster, name, command))
        stack.callback(_end_jobs, cluster)
        _wait_until_idle(cluster, num_nodes)
        yield cluster


_MUNGE_FILES = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


@contextmanager
def _daemon(cluster: SlurmCluster, name: str, command: list[str]) -> Iterator[None]:
    with (cluster.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=cluster.env, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_jobs(cluster: SlurmCluster) -> None:
    cluster.run("scancel", "--user=root")
    end_s = time.monotonic() + 40
    while cluster.run("squeue", "--noheader") and time.monotonic() < end_s:
        time.sleep(0.3)


def _wait_until_idle(cluster: SlurmCluster, num_nodes: int) -> None:
    end_s = time.monotonic() + 30
    while True:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=cluster.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.split() == ["idle"] * num_nodes:
            return
        logs = "".join(f"\n{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(cluster.folder.glob("*.log")))
        assert time.monotonic() < end_s, f"Slurm must start: {done.stdout}{done.stderr}{logs}"
        time.sleep(0.2)
