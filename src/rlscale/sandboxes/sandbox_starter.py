"""Starts the first process of each sandbox of this machine.

    run ── control socket ── starter ── fork ── outer process of a sandbox, see namespace_init.py

The starter has imported what these processes need, which takes two thirds of the time of a sandbox. It ends with the
run, because the control socket closes; the sandboxes that it has started do not depend on it.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

_PID_BYTES = 32


class SandboxStarter:
    """The starter of this process, which is started by the first call and again if it has ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start_process(self, connection: socket.socket) -> int:
        """Starts the outer process of a sandbox with this connection and returns its number.

        Raises OSError if no process can be started.
        """
        with self._lock:
            if self._owner != os.getpid():  # the starter belongs to the process that this one was forked from
                self._control = self._process = None
            with suppress(OSError):
                if self._control is not None:
                    return self._send(self._control, connection)
            self._open()
            assert self._control is not None, "it is open"
            return self._send(self._control, connection)

    def _open(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()  # it has ended, or ends now
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The search path is that of the standard library and of rlscale alone: the processes are still privileged.
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        program = (
            f"import sys; sys.path.append({package!r}); from rlscale.sandboxes.namespace_init import fork_each; "
            f"fork_each({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
        self._owner = os.getpid()

    def _send(self, control: socket.socket, connection: socket.socket) -> int:
        socket.send_fds(control, [b"\0"], [connection.fileno()])
        answer = control.recv(_PID_BYTES)
        if not answer:
            raise ConnectionResetError("the starter of sandboxes has ended")
        return int(answer)


starter = SandboxStarter()
"""The starter of this process."""
