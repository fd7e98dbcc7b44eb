"""One suite for every backend of sandboxes: files, processes, network, limits, cancellation, parallel use."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from docker.errors import DockerException

from docker import APIClient
from rlscale.errors import SandboxError
from rlscale.sandboxes.docker_sandbox import DockerSandbox
from rlscale.sandboxes.fusion_sandbox import FusionSandbox
from rlscale.sandboxes.sandbox import Sandbox, SandboxLimits
from rlscale.sandboxes.subprocess_sandbox import SubprocessSandbox
from tests.fake_docker import IMAGE
from tests.fake_fusion import FakeFusion

LIMITS = SandboxLimits(timeout_s=20.0, memory_bytes=256 * 2**20, disk_bytes=64 * 2**20, max_processes=32)
ROOT = Path(__file__).parents[2]
Create = Callable[[SandboxLimits], Sandbox]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sandboxes need Linux")


@pytest.fixture(scope="module")
def fake_docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a fake daemon in a separate process."""
    path = tmp_path_factory.mktemp("docker") / "docker.sock"
    command = [sys.executable, "-m", "tests.fake_docker", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield f"unix://{path}"
        process.kill()


@pytest.fixture(params=["subprocess", "docker_fake", "docker", "fusion_fake"])
async def create(request: pytest.FixtureRequest) -> AsyncIterator[Create]:
    if request.param == "docker":
        if (reason := _docker_fault()) is not None:
            pytest.skip(f"no docker daemon with the image {IMAGE}: {reason}")
        yield partial(DockerSandbox, image=IMAGE)
    elif request.param == "docker_fake":
        yield partial(DockerSandbox, image=IMAGE, url=request.getfixturevalue("fake_docker"))
    elif request.param == "fusion_fake":
        # The service keeps the files of a program next to their archive.
        limits = replace(LIMITS, disk_bytes=2 * LIMITS.disk_bytes, max_output_bytes=2**20)
        async with TestServer(FakeFusion(limits).app()) as server:
            yield partial(FusionSandbox, url=str(server.make_url("")))
    else:
        yield SubprocessSandbox


@cache
def _docker_fault() -> str | None:
    """The reason why there is no real daemon with the image of the tests."""
    try:
        client = APIClient(version="auto", timeout=5)
        client.inspect_image(IMAGE)
    except DockerException as error:
        return str(error).splitlines()[0]
    return None


@pytest.fixture
async def sandbox(create: Create) -> AsyncIterator[Sandbox]:
    sandbox = create(LIMITS)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


async def test_a_program_gets_its_input_and_returns_its_output(sandbox: Sandbox) -> None:
    result = await sandbox.exec('read line; echo "got $line"; echo problem >&2; exit 3', stdin="hello\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("got hello\n", "problem\n", 3)
    assert not result.timed_out and not result.truncated and result.duration_s > 0


async def test_arguments_are_passed_without_a_shell(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", ""])).stdout == "a b|$HOME||"


async def test_code_runs_and_its_error_is_a_result(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(code="print(sum(range(10)))")).stdout == "45\n"
    failed = await sandbox.exec(code="print('before')\n1 / 0")
    assert (failed.stdout, failed.exit_code) == ("before\n", 1)
    assert "line 2" in failed.stderr and failed.stderr.strip().endswith("ZeroDivisionError: division by zero")


async def test_exactly_one_of_command_and_code_is_given(sandbox: Sandbox) -> None:
    for given in ({}, {"command": "true", "code": "1"}):
        with pytest.raises(ValueError, match="either a command or code"):
            await sandbox.exec(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non-empty list"):
        await sandbox.exec([])


async def test_a_missing_program_is_a_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["no-such-program"])
    assert result.exit_code == 127 and "no-such-program" in result.stderr


async def test_files_stay_until_the_end(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 4
    await sandbox.write("folder/in.bin", content)
    result = await sandbox.exec(code="d = open('folder/in.bin', 'rb').read()\nopen('out.bin', 'wb').write(d[::-1])")
    assert result.exit_code == 0, result.stderr
    assert await sandbox.read("out.bin") == content[::-1]
    await sandbox.write("folder/in.bin", "text")
    assert await sandbox.read("folder/in.bin") == b"text"


async def test_wrong_paths_raise_like_open(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir folder; mkfifo pipe")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read("folder")
    with pytest.raises(OSError, match="pipe"):
        await sandbox.read("pipe")
    with pytest.raises(IsADirectoryError):
        await sandbox.write("folder", b"")
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_a_big_file_is_written_and_read(sandbox: Sandbox) -> None:
    content = os.urandom(1 << 20) * 16
    await sandbox.write("big", content)
    assert await sandbox.read("big") == content


async def test_the_size_of_all_files_is_limited(sandbox: Sandbox) -> None:
    result = await sandbox.exec("for i in 1 2 3 4 5 6 7 8; do head -c 20000000 /dev/zero > f$i || exit 9; done")
    assert result.exit_code == 9
    assert (await sandbox.exec("rm f*; echo fine")).stdout == "fine\n"


async def test_output_that_is_not_utf8_is_replaced(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 'a\\377\\200b\\303\\251'")
    assert result.stdout == "a\ufffd\ufffdb\u00e9"


async def test_a_gigabyte_of_output_is_cut(sandbox: Sandbox) -> None:
    before = _peak_memory()
    result = await sandbox.exec("head -c 1000000000 /dev/zero; echo done >&2", timeout_s=100.0)
    assert result.truncated and result.stdout == "\0" * LIMITS.max_output_bytes
    assert (result.exit_code, result.stderr) == (0, "done\n")
    assert _peak_memory() - before < 100 * 2**20


async def test_a_program_is_killed_at_its_deadline_with_its_children(sandbox: Sandbox) -> None:
    result = await sandbox.exec("setsid sleep 1000 & echo started; sleep 1000", timeout_s=1.0)
    assert result.timed_out and result.exit_code == 137 and result.stdout == "started\n"
    assert await _num_processes(sandbox, "sleep") == 0


async def test_processes_end_with_the_program_that_started_them(sandbox: Sandbox) -> None:
    result = await sandbox.exec("nohup setsid sleep 1000 > /dev/null 2>&1 & echo started")
    assert result.stdout == "started\n" and not result.timed_out
    assert await _num_processes(sandbox, "sleep") == 0


async def test_a_child_that_keeps_the_output_open_does_not_delay_the_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec("sleep 1000 & echo started", timeout_s=60.0)
    assert result.stdout == "started\n" and not result.timed_out


async def test_a_fork_bomb_ends(sandbox: Sandbox) -> None:
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=2.0)
    assert result.exit_code != 0 or result.timed_out
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_memory_is_limited(sandbox: Sandbox) -> None:
    one = await sandbox.exec(code="x = b'1' * 10**9")
    assert one.exit_code != 0
    several = """
import os, time
for i in range(8):
    if os.fork() == 0:
        x = bytearray(100 * 2**20)
        for j in range(0, len(x), 4096):
            x[j] = 1
        time.sleep(1000)
while True:
    try:
        _, status = os.wait()
    except ChildProcessError:
        break
    if status:
        os._exit(9)
"""
    result = await sandbox.exec(code=several, timeout_s=60.0)
    assert result.exit_code in (9, 137) and not result.timed_out


async def test_a_program_that_computes_forever_is_killed(sandbox: Sandbox) -> None:
    result = await sandbox.exec(code="while True: pass", timeout_s=1.0)
    assert result.timed_out
    caught = "import signal as s, time\nfor i in range(1, 32):\n  try: s.signal(i, s.SIG_IGN)\n  except OSError: 0\n"
    assert (await sandbox.exec(code=f"{caught}while True: time.sleep(1)", timeout_s=1.0)).timed_out


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    code = """
import socket
for family, address in ((socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET, ("8.8.8.8", 53))):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(5)
        try:
            s.connect(address)
            print("connected")
        except OSError as error:
            print(type(error).__name__)
"""
    assert (await sandbox.exec(code=code)).stdout == "OSError\n" * 2
    assert set((await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()) <= {"lo"}


async def test_services_of_this_machine_are_not_reached(sandbox: Sandbox) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
    async with server:
        assert "ConnectionRefusedError" in (await sandbox.exec(code=code)).stderr


async def test_the_environment_of_the_run_is_not_passed_on(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCALE_TEST_SECRET", "secret-value")
    sandbox = create(LIMITS)
    await sandbox.start()
    try:
        result = await sandbox.exec("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
    finally:
        await sandbox.stop()
    assert "HOME=" in result.stdout and "secret-value" not in result.stdout


async def test_programs_run_as_an_unprivileged_user(sandbox: Sandbox) -> None:
    result = await sandbox.exec("id -u; grep -E '^(CapEff|CapPrm|CapAmb|CapInh)' /proc/self/status | cut -f2 | sort -u")
    user, *capabilities = result.stdout.split()
    assert user != "0" and capabilities == ["0" * 16]


async def test_the_system_cannot_be_changed(sandbox: Sandbox) -> None:
    result = await sandbox.exec("for path in /usr/x /etc/x /x /dev/x /bin/x; do touch $path; ls $path; done")
    assert result.exit_code != 0 and result.stdout == ""


async def test_sandboxes_do_not_see_each_other(create: Create) -> None:
    sandboxes = [create(LIMITS) for _ in range(4)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    try:
        await asyncio.gather(*(each.write("own", str(number)) for number, each in enumerate(sandboxes)))
        listings = await asyncio.gather(*(each.exec("ls; cat own; echo; ls /tmp | wc -l") for each in sandboxes))
        assert [each.stdout.split() for each in listings] == [["own", str(number), "0"] for number in range(4)]
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))


async def test_calls_of_one_sandbox_run_one_after_another(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(f"echo {i} >> log; echo {i}") for i in range(5)))
    assert [each.stdout for each in results] == [f"{i}\n" for i in range(5)]
    assert sorted((await sandbox.read("log")).split()) == [b"0", b"1", b"2", b"3", b"4"]


async def test_stop_while_a_program_runs(create: Create) -> None:
    sandbox = create(LIMITS)
    await sandbox.start()
    call = asyncio.create_task(sandbox.exec("touch started; sleep 1000", timeout_s=1000.0))
    await asyncio.sleep(0)
    await sandbox.stop()
    with pytest.raises(SandboxError):
        await call
    with pytest.raises(SandboxError):
        await sandbox.exec("true")
    await sandbox.stop()


def _peak_memory() -> int:
    with open("/proc/self/status") as opened:
        return next(int(line.split()[1]) * 1024 for line in opened if line.startswith("VmHWM"))


async def _num_processes(sandbox: Sandbox, name: str) -> int:
    code = f"""
import os
names = []
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        names.append(open('/proc/' + pid + '/comm').read().strip())
    except OSError:
        pass
print(names.count({name!r}))
"""
    result = await sandbox.exec(code=code)
    assert result.exit_code == 0, result.stderr
    return int(result.stdout)
