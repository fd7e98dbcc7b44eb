"""Hostile programs in a sandbox of this machine, and its end with the process that started it."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import SandboxLimits
from rlscale.sandboxes.sandbox_starter import starter
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox

SOURCE = str(Path(__file__).parents[3] / "src")
SYSTEM_PYTHON = "/usr/bin/python3"
LIBC = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.fixture
async def sandbox() -> AsyncIterator[SubprocessSandbox]:
    async with SubprocessSandbox(SandboxLimits(timeout_s=20.0)) as sandbox:
        yield sandbox


async def test_files_of_the_run_do_not_exist(sandbox: SubprocessSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "answers.jsonl"
    secret.write_text("secret")
    secret.chmod(0o666)
    for path in (secret, Path(__file__), Path(f"/proc/1/root{secret}"), Path(f"/proc/self/root/..{secret}")):
        result = await sandbox.exec(["cat", str(path)])
        assert result.exit_code == 1 and not result.stdout, path
    found = await sandbox.exec("find / -name answers.jsonl 2>/dev/null; ls /sys /work /home /var 2>/dev/null | wc -l")
    assert found.stdout == "0\n"


async def test_a_socket_file_of_the_machine_is_not_reached(sandbox: SubprocessSandbox, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(tmp_path / "s"))
        server.listen()
        abstract.bind(f"\0rlscale-{os.getpid()}")
        abstract.listen()
        for address in (str(tmp_path / "s"), f"\0rlscale-{os.getpid()}"):
            code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})"
            assert (await sandbox.exec(code=code)).exit_code == 1, address


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("libc.unshare(0x10000000)", "EPERM"),
        ("libc.unshare(0x00020000)", "EPERM"),
        ("libc.mount(b'none', b'/sandbox', b'tmpfs', 0, None)", "EPERM"),
        ("libc.ptrace(16, 1, 0, 0)", "EPERM"),
        ("libc.memfd_create(b'x', 0)", "EPERM"),
        ("libc.shmget(0, 4096, 0o1600)", "EPERM"),
        ("libc.socket(40, 1, 0)", "EPERM"),  # AF_VSOCK
        ("libc.socket(38, 5, 0)", "EPERM"),  # AF_ALG
        ("libc.prlimit(1, 7, None, ctypes.create_string_buffer(16))", "EPERM"),
        ("libc.setns(0, 0)", "EPERM"),
        ("libc.setuid(0)", "EPERM"),
    ],
)
async def test_system_calls_that_lead_out_are_refused(sandbox: SubprocessSandbox, call: str, error: str) -> None:
    result = await sandbox.exec(code=f"{LIBC}print({call}, errno.errorcode.get(ctypes.get_errno()))")
    assert result.stdout == f"-1 {error}\n", result.stderr


async def test_threads_and_processes_of_python_work(sandbox: SubprocessSandbox) -> None:
    code = """
import multiprocessing, subprocess, tempfile, threading
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(square, range(4)))
    print(subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout.strip())
    thread = threading.Thread(target=lambda: print("thread")); thread.start(); thread.join()
    print(tempfile.mkdtemp().startswith("/tmp/"))
"""
    result = await sandbox.exec(code=code)
    assert result.stdout == "[0, 1, 4, 9]\nhi\nthread\nTrue\n", result.stderr


async def test_the_first_process_survives_attacks(sandbox: SubprocessSandbox) -> None:
    code = """
import os, signal
for number in range(1, 65):
    for pid in (1, -1):
        try:
            if pid == 1 or number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN) if number not in (9, 19, 32, 33) else None
                os.kill(pid, number)
        except (OSError, ValueError): pass
for name in ("mem", "environ", "fd", "maps", "root"):
    try:
        with open("/proc/1/" + name, "rb") as opened: print("read", name, opened.read(1))
    except OSError: pass
"""
    result = await sandbox.exec(code=code)
    assert result.stdout == "" and (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_the_input_cannot_grow(sandbox: SubprocessSandbox) -> None:
    result = await sandbox.exec(code=f"{LIBC}print(os.read(0, 9), libc.write(0, b'x' * 9, 9))", stdin="abc")
    assert result.stdout == "b'abc' -1\n"


async def test_many_small_files_are_limited(sandbox: SubprocessSandbox) -> None:
    result = await sandbox.exec(code="for i in range(10**6): open(f'/tmp/{i}', 'w')", timeout_s=100.0)
    assert "No space left" in result.stderr


async def test_further_folders_can_be_read_and_not_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # programs run as another user
    (tmp_path / "module_of_user.py").write_text("value = 7")
    async with SubprocessSandbox(read_only=[str(tmp_path)]) as sandbox:
        code = f"import sys; sys.path.append({str(tmp_path)!r}); import module_of_user; print(module_of_user.value)"
        assert (await sandbox.exec(code=code)).stdout == "7\n"
        assert "Read-only" in (await sandbox.exec(["touch", str(tmp_path / "x")])).stderr


async def test_programs_have_the_standard_library_alone(sandbox: SubprocessSandbox) -> None:
    code = "import importlib.metadata, json, sqlite3\nprint([each.name for each in importlib.metadata.distributions()])"
    assert (await sandbox.exec(code=code)).stdout == "[]\n"


async def test_the_network_is_there_if_it_is_allowed() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5); print('connected')"
    async with server, SubprocessSandbox(SandboxLimits(has_network=True)) as sandbox:
        assert (await sandbox.exec(code=code)).stdout == "connected\n"


async def test_a_first_process_that_dies_is_an_error_of_the_sandbox(sandbox: SubprocessSandbox) -> None:
    call = asyncio.create_task(sandbox.exec("echo started; sleep 1000", timeout_s=1000.0))
    pid = await _wait_for_child(sandbox)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="a sandbox ended"):
        await call


async def test_a_cancelled_call_stops_the_sandbox(sandbox: SubprocessSandbox) -> None:
    call = asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=1000.0))
    pid = await _wait_for_child(sandbox)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await sandbox.stop()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SandboxError, match="not running"):
        await sandbox.exec("true")


async def test_a_starter_that_dies_is_started_again_and_its_sandboxes_live(sandbox: SubprocessSandbox) -> None:
    assert starter._process is not None
    before = starter._process.pid
    os.kill(before, signal.SIGKILL)
    async with SubprocessSandbox() as second:
        assert starter._process.pid != before
        for each in (sandbox, second):
            assert (await each.exec("echo fine")).stdout == "fine\n"


async def test_a_fork_of_the_run_has_its_own_starter(sandbox: SubprocessSandbox) -> None:
    pid = os.fork()
    if not pid:
        # As a pool of processes that are forked; nothing of the event loop is used here.
        ours, theirs = socket.socketpair()
        with theirs:
            outer = starter.start_process(theirs)
        ours.shutdown(socket.SHUT_WR)
        is_own = Path(f"/proc/{outer}/stat").read_text().split(") ")[1].split()[1] == str(starter._process.pid)  # type: ignore[union-attr]
        os._exit(0 if is_own and starter._owner == os.getpid() and ours.recv(1) == b"" else 1)
    assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


PROGRAM = """
import asyncio, os, signal, sys
sys.path.insert(0, {source!r})
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox
async def main():
    async with SubprocessSandbox() as sandbox:
        result = await sandbox.exec("id -u; cat /proc/net/dev | wc -l; ls / | sort | tr '\\\\n' ' '")
        print(result.stdout, flush=True)
        if {dies}:
            call = asyncio.create_task(sandbox.exec("trap '' TERM HUP INT; sleep 54321 & sleep 54321", timeout_s=999))
            while not any(b"54321" in c for c in commands()):
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
def commands():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/" + pid + "/cmdline", "rb") as opened: yield opened.read()
        except OSError: pass
asyncio.run(main())
"""


def test_nothing_is_left_of_a_run_that_was_killed() -> None:
    program = PROGRAM.format(source=SOURCE, dies=True)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for _ in range(1000):
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if "sleep 54321" not in listed:
            return
    pytest.fail(f"still running: {listed}")


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user here")
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="another user may not read the interpreter of the tests")
def test_an_unprivileged_user_has_the_same_sandbox(tmp_path: Path) -> None:
    # The folders of the checkout may be closed to other users, so that they get a copy.
    copy = Path("/dev/shm") / f"rlscale-test-{os.getpid()}"
    package = copy / "rlscale"
    try:
        shutil.copytree(Path(SOURCE) / "rlscale" / "sandboxes", package / "sandboxes")
        for name in ("__init__.py", "errors.py"):
            shutil.copy(Path(SOURCE) / "rlscale" / name, package / name)
        copy.chmod(0o755)
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", PROGRAM.format(source=str(copy), dies=False)],
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            env={},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        shutil.rmtree(copy)
    assert done.returncode == 0, done.stderr
    user, interfaces, *folders = done.stdout.split()
    assert (user, interfaces) == ("1000", "3")  # two lines of headings, and lo
    assert "home" not in folders and "root" not in folders and {"sandbox", "usr"} <= set(folders)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the right to namespaces from root")
def test_a_machine_without_namespaces_is_refused_with_the_reason() -> None:
    program = textwrap.dedent(PROGRAM.format(source=SOURCE, dies=False))
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "SandboxError: a sandbox did not start: " in done.stderr and "use docker" in done.stderr


async def _wait_for_child(sandbox: SubprocessSandbox) -> int:
    """Number of the inner process once it has started a program."""
    assert sandbox._pid is not None
    while True:
        (inner,) = _children(sandbox._pid)
        if _children(inner):
            return inner
        await asyncio.sleep(0.01)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
