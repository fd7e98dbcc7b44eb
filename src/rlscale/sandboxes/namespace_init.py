"""First process of a sandbox of this machine. It starts programs, limits and ends them, and sends their output.

    run ── socket ── outer process ── inner process (process 1 of its PID namespace) ── programs, as another user

The kernel ends all processes of the sandbox with the inner process. That ends with the outer one, and when the socket
closes, so that nothing remains of a run that was killed. The outer process has the socket open until its end, so that
the run reads end-of-file when no process is left. Outer processes are forks of the starter, see
sandbox_starter.py. Standard library only; no installed package is on its path.
"""

import errno
import fcntl
import math
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlscale.sandboxes.confine_process import Confinement, ProcessLimits, confine
from rlscale.sandboxes.linux_calls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    prctl,
    start_loopback,
    unshare,
)
from rlscale.sandboxes.namespace_root import HOME, enter_root
from rlscale.sandboxes.sandbox_frames import pack_sandbox_frame, receive_sandbox_frame

# Above all users of a machine; with the process id, no two sandboxes share a user and its limits.
_FIRST_USER = 0x70000000
_INNER_USER = 1000  # in a user namespace
_CHECK_INTERVAL_S = 0.1
_MAX_KILL_S = 10.0
_CHUNK = 1 << 16
_ADD_SEALS, _SEAL_WRITES = 1033, 2 | 4 | 8  # shrink, grow and write
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Setup = dict[str, Any]


def fork_each(descriptor: int) -> None:
    """Forks an outer process for each connection that the run sends, and answers its number, until the run ends."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended processes
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        connection = socket.socket(fileno=descriptors[0])
        outer = os.fork()
        if not outer:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            try:
                _run_outer(connection)
            finally:
                os._exit(0)
        connection.close()
        control.send(str(outer).encode())


def _run_outer(connection: socket.socket) -> None:
    """The outer process, which ends with the inner one."""
    frame = receive_sandbox_frame(connection)
    if frame is None:
        return
    setup, _ = frame
    try:
        confinement = _enter_namespaces(setup)
    except OSError as error:
        connection.sendall(pack_sandbox_frame({"error": str(error)}))
        return
    inner = os.fork()
    if inner:
        os.waitpid(inner, 0)
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _prepare(setup, confinement)
    except OSError as error:
        connection.sendall(pack_sandbox_frame({"error": str(error)}))
        os._exit(1)
    connection.sendall(pack_sandbox_frame({"user": confinement.user, "drops_user": confinement.drops_user}))
    _serve(connection, setup, confinement)
    os._exit(0)


def _enter_namespaces(setup: Setup) -> Confinement:
    """Unshares all namespaces: as root directly, else in a user namespace."""
    limits = ProcessLimits(**{name: setup[name] for name in ("memory_bytes", "disk_bytes", "max_processes")})
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    flags |= 0 if setup["has_network"] else CLONE_NEWNET
    if os.geteuid() == 0:
        user = _FIRST_USER + os.getpid()
        try:
            unshare(flags)
            return Confinement(user=user, drops_user=True, limits=limits)
        except PermissionError:  # root of a container without CAP_SYS_ADMIN
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            # The kernel gives the files of /proc/self to root after a change of the user.
            prctl(PR_SET_DUMPABLE, 1)
    user, group = os.geteuid(), os.getegid()
    unshare(flags | CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_USER} {user} 1"),
        ("gid_map", f"{_INNER_USER} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as opened:
            opened.write(text)
    return Confinement(user=_INNER_USER, drops_user=False, limits=limits)


def _prepare(setup: Setup, confinement: Confinement) -> None:
    os.setsid()
    os.umask(0o022)
    enter_root(
        read_only=setup["read_only"],
        hidden=setup["hidden"],
        disk_bytes=setup["disk_bytes"],
        user=confinement.user,
        has_network=setup["has_network"],
    )
    if not setup["has_network"]:
        start_loopback()
        if interfaces := _interfaces() - {"lo"}:
            raise OSError(errno.ENETDOWN, f"the sandbox has the network interfaces {', '.join(sorted(interfaces))}")
    python = setup["python"]
    if not os.access(python, os.X_OK):
        raise OSError(errno.ENOENT, f"{python} does not exist in the sandbox")
    # No program can read the memory of this process, or its descriptors.
    prctl(PR_SET_DUMPABLE, 0)


def _interfaces() -> set[str]:
    with open("/proc/net/dev") as opened:
        return {line.split(":")[0].strip() for line in opened.readlines()[2:]}


@dataclass(kw_only=True)
class Job:
    """One call: a program, or one of the functions that read and write a file as the user of the programs."""

    body: Callable[[], None]
    stdin: bytes
    timeout_s: float
    max_bytes: int  # kept of each of the two outputs
    memory_bytes: int
    outputs: dict[int, bytearray] = field(default_factory=dict)  # descriptor -> what has been kept
    is_cut: bool = False
    status: int | None = None
    end: str = ""  # `timeout` or `memory`, if this process ended it


def _serve(connection: socket.socket, setup: Setup, confinement: Confinement) -> None:
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while (frame := receive_sandbox_frame(connection)) is not None:
        request, payload = frame
        job = _job_of(request, payload, setup)
        started = time.monotonic()
        stdout, stderr = _run(job, connection, wake_read, confinement)
        assert job.status is not None
        code = os.waitstatus_to_exitcode(job.status)
        reply = {
            "exit_code": code if code >= 0 else 128 - code,
            "end": job.end,
            "is_cut": job.is_cut,
            "duration_s": time.monotonic() - started,
            "stdout_bytes": len(stdout),
        }
        connection.sendall(pack_sandbox_frame(reply, bytes(stdout + stderr)))


def _job_of(request: dict[str, Any], payload: bytes, setup: Setup) -> Job:
    memory_bytes = setup["memory_bytes"]
    if request["kind"] == "exec":
        command, env = request["command"], request["env"]
        return Job(
            body=lambda: _execute(command, env),
            stdin=payload,
            timeout_s=request["timeout_s"],
            max_bytes=setup["max_output_bytes"],
            memory_bytes=memory_bytes,
        )
    path = os.path.join(HOME, request["path"])
    is_read = request["kind"] == "read"
    return Job(
        body=lambda: (_read if is_read else _write)(path),
        stdin=payload,
        timeout_s=request["timeout_s"],
        max_bytes=setup["disk_bytes"],
        memory_bytes=memory_bytes,
    )


def _run(job: Job, connection: socket.socket, wake: int, confinement: Confinement) -> tuple[bytearray, bytearray]:
    """Starts the process of a job and waits for its end, then kills all that it has started."""
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write_all(stdin, job.stdin)
    # The memory of this file has no other limit.
    fcntl.fcntl(stdin, _ADD_SEALS, _SEAL_WRITES)
    os.lseek(stdin, 0, os.SEEK_SET)
    stdout, stdout_of_child = os.pipe()
    stderr, stderr_of_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become((stdin, stdout_of_child, stderr_of_child), job, confinement)
    for descriptor in (stdin, stdout_of_child, stderr_of_child):
        os.close(descriptor)
    job.outputs = {stdout: bytearray(), stderr: bytearray()}
    poll = select.poll()
    for descriptor in (connection.fileno(), wake, stdout, stderr):
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + job.timeout_s
    next_check = 0.0
    while job.status is None and not job.end:
        now = time.monotonic()
        if now >= deadline:
            job.end = "timeout"
        elif now >= next_check:
            next_check = now + _CHECK_INTERVAL_S
            if _used_memory() > job.memory_bytes:
                job.end = "memory"
        wait_s = min(deadline - now, _CHECK_INTERVAL_S)
        for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000):
            if descriptor == connection.fileno():
                os._exit(0)  # the run has ended or stops the sandbox
            elif descriptor == wake:
                _drain(wake)
            elif not _collect(job, descriptor):
                poll.unregister(descriptor)
        _reap(job, pid)
    _kill_all(job, pid)
    for descriptor in job.outputs:
        while _collect(job, descriptor):  # no process has the other end, so that it ends
            pass
        os.close(descriptor)
    kept = list(job.outputs.values())
    return kept[0], kept[1]


def _become(streams: tuple[int, int, int], job: Job, confinement: Confinement) -> None:
    """Turns this forked process into that of a job. Never returns."""
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1 << 16)
        os.setsid()
        confine(confinement, cpu_s=math.ceil(job.timeout_s) + 1)
        os.chdir(HOME)
        job.body()
        code = 0
    except OSError as error:
        os.write(2, f"{error.strerror or error}: {error.filename}\n".encode())
        code = error.errno or 126
    finally:
        os._exit(code)


def _execute(command: list[str], env: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _read(path: str) -> None:
    # Not blocking: a program may have left a pipe with this name.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), path)
    while content := os.read(opened, _CHUNK):
        _write_all(1, content)


def _write(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    while content := os.read(0, _CHUNK):
        _write_all(opened, content)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _collect(job: Job, descriptor: int) -> bool:
    """Reads a part of an output, keeps the first bytes and drops the rest. False: it has ended."""
    content = os.read(descriptor, _CHUNK)
    kept = job.outputs[descriptor]
    free = job.max_bytes - len(kept)
    kept += content[:free]
    job.is_cut = job.is_cut or len(content) > free
    return bool(content)


def _drain(wake: int) -> None:
    try:
        while os.read(wake, _CHUNK):
            pass
    except BlockingIOError:
        pass


def _reap(job: Job, pid: int) -> bool:
    """Removes ended processes, whoever started them. False: there are no others."""
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if found == 0:
            return True
        if found == pid:
            job.status = status


def _kill_all(job: Job, pid: int) -> None:
    """Ends every process of the sandbox but this one: in its PID namespace, -1 means exactly those."""
    give_up = time.monotonic() + _MAX_KILL_S
    while True:
        with suppress(ProcessLookupError):  # there is none
            os.kill(-1, signal.SIGKILL)
        if not _reap(job, pid):
            return
        if time.monotonic() > give_up:
            os._exit(1)
        time.sleep(0.001)


def _used_memory() -> int:
    """Private memory of all programs, in bytes. Files of /sandbox are limited by its size."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as opened:
                    _, resident, shared, *_ = map(int, opened.read().split())
            except OSError:  # it has ended
                continue
            pages += resident - shared
    return pages * _PAGE_BYTES
