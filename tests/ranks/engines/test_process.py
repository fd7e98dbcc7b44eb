"""Start, failure and end of server processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.errors import EngineError

URL = "http://127.0.0.1:9"
# Starts a child that ignores SIGTERM, writes both ids, and waits.
WITH_CHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
# Starts an EngineProcess and waits to be killed.
PARENT = """
import os, sys, time
from pathlib import Path
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
folder = Path(sys.argv[1])
process = EngineProcess([sys.executable, "-c", "import time; time.sleep(600)"], name="engine 0", url="http://127.0.0.1:9",
                        env=os.environ, log_path=folder / "log")
process.start()
(folder / "pid.tmp").write_text(str(process.pid))
(folder / "pid.tmp").rename(folder / "pid")
time.sleep(600)
"""

# Answers every request with status 200.
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer.allow_reuse_address = False
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def make(folder: Path, *command: str) -> EngineProcess:
    return EngineProcess(
        list(command), name="engine 3", url=URL, env=os.environ, log_path=folder / "logs" / "engine.log"
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.02)


def test_death_before_ready_reports_the_end_of_the_log(tmp_path: Path) -> None:
    process = make(tmp_path, sys.executable, "-c", "print('port is taken'); raise SystemExit(7)")
    process.start()
    with pytest.raises(EngineError, match=r"(?s)engine 3 ended with status 7.*port is taken"):
        process.wait_ready(timeout_s=30)
    assert "status 7" in str(process.poll())
    process.stop()


def test_server_that_never_gets_ready(tmp_path: Path) -> None:
    process = make(tmp_path, sys.executable, "-c", "import time; time.sleep(600)")
    process.start()
    assert process.poll() is None
    with pytest.raises(EngineError, match=r"engine 3 was not ready after 0\.2 s"):
        process.wait_ready(timeout_s=0.2)
    process.stop()
    assert process.poll() is not None


def test_stop_kills_children_that_ignore_sigterm(tmp_path: Path) -> None:
    process = make(tmp_path, sys.executable, "-c", WITH_CHILD, str(tmp_path / "pids"))
    process.start()
    pids = [int(pid) for pid in wait_for(tmp_path / "pids").split()]
    process.stop(grace_s=2)
    for pid in pids:
        wait_until_dead(pid)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux only")
def test_server_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    pid = int(wait_for(tmp_path / "pid"))
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_dead(pid)


def test_another_server_at_the_port_is_not_taken_for_this_one(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    serve = [sys.executable, "-c", HEALTHY, str(port)]
    url = f"http://127.0.0.1:{port}"
    first, second = (
        EngineProcess(serve, name=f"engine {i}", url=url, env=os.environ, log_path=tmp_path / f"{i}.log")
        for i in range(2)
    )
    try:
        first.start()
        first.wait_ready(timeout_s=20)
        second.start()
        with pytest.raises(EngineError, match="Address already in use"):
            second.wait_ready(timeout_s=20)
    finally:
        first.stop()
        second.stop()
