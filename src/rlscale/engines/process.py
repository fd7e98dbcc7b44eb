"""The server process of one engine, of any kind."""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from rlscale.engines.listening import session_listens
from rlscale.engines.process_lifetime import die_with_parent_command
from rlscale.errors import EngineError

log = logging.getLogger(__name__)

TAIL_LINES = 20
POLL_S = 0.05


class EngineProcess:
    """Starts a server, waits until it is healthy, and ends it together with its child processes.

    The server runs in a separate session, so that its children can be ended with it, and dies when this process dies.
    Linux ties that to the thread that forked it, so each server has a thread here that lives exactly as long.

    Example:
        process = EngineProcess(command, name="engine 0", url=url, env=env, log_path=folder / "engine_0.log")
        process.start()
        process.wait_ready(timeout_s=60)
        ...
        process.stop()
    """

    def __init__(
        self,
        command: list[str],
        *,
        name: str,
        url: str,
        env: Mapping[str, str],
        log_path: Path,
        api_key: str | None = None,
    ) -> None:
        self.command, self.name, self.url, self.log_path = list(command), name, url.rstrip("/"), log_path
        self._env, self._api_key, self._port = dict(env), api_key, urllib.parse.urlsplit(url).port
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._spawned = threading.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the server without waiting until it is ready.

        Raises EngineError when the command cannot be run.
        """
        assert self._process is None, f"{self.name} is started already"
        if shutil.which(self.command[0], path=self._env.get("PATH")) is None:
            raise EngineError(f"{self.name} could not be started: there is no command {self.command[0]}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._spawn_and_reap, name=f"{self.name} watcher", daemon=True).start()
        self._spawned.wait()
        if self._failure is not None:
            raise EngineError(f"{self.name} could not be started: {self._failure}") from self._failure

    def _spawn_and_reap(self) -> None:
        try:
            with self.log_path.open("ab") as output:
                self._process = subprocess.Popen(
                    die_with_parent_command(self.command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
        except OSError as e:
            self._failure = e
        finally:
            self._spawned.set()
        # The thread must outlive the server: the kernel kills the server when the thread ends.
        if self._process is not None:
            self._process.wait()

    def wait_ready(self, timeout_s: float) -> None:
        """Blocks until /health returns status 200.

        An answer of another server, e.g. of another run to which this port was given, is not taken for that of this
        one, which ends as soon as it tries to listen.

        Raises EngineError with the end of the server's log when the server dies or is not healthy in time.
        """
        deadline = time.monotonic() + timeout_s
        while not (self._is_healthy() and self._listens()):
            ended = self.poll()
            if ended is not None:
                raise EngineError(f"{ended}\n(before it was ready)")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} was not ready after {timeout_s:g} s; {self._log_tail()}")
            time.sleep(POLL_S)

    def poll(self) -> str | None:
        """The exit status of the server and the end of its log; None while it runs."""
        assert self._process is not None, f"{self.name} is not started"
        status = self._process.poll()
        return None if status is None else f"{self.name} ended with status {status}; {self._log_tail()}"

    @property
    def was_killed(self) -> bool:
        """Reports whether a signal ended the server, as opposed to an error."""
        status = None if self._process is None else self._process.poll()
        return status is not None and status < 0

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends the server and its children: SIGTERM, then SIGKILL after `grace_s`. No effect if it never started."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("%s did not end within %g s of SIGTERM and is killed", self.name, grace_s)
        # Also when the server itself has ended: its children may ignore SIGTERM.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # the whole group has ended

    def _listens(self) -> bool:
        """Whether this server, which leads a session, is the one that listens at its port."""
        assert self._process is not None and self._port is not None
        return session_listens(self._process.pid, self._port)

    def _is_healthy(self) -> bool:
        request = urllib.request.Request(f"{self.url}/health")
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        # Without the proxies of the environment: the server is on this machine or in this cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _log_tail(self) -> str:
        """Path of the log, and its last lines below: a message may show the first line alone."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log_path.exists() else []
        return "\n".join([f"log: {self.log_path}", *lines])
