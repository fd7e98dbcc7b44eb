"""Sandboxes of docker and SandboxFusion: what the contract of all sandboxes does not cover. Both servers are fakes."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sandbox_fusion
from aiohttp.test_utils import TestServer

from docker import APIClient
from rlscale.config import load_config
from rlscale.errors import SandboxError
from rlscale.sandboxes.docker_sandbox import DockerSandbox
from rlscale.sandboxes.fusion_sandbox import FusionSandbox
from rlscale.sandboxes.open_sandboxes import find_sandbox_fault
from rlscale.sandboxes.sandbox import SandboxLimits
from tests.fake_docker import IMAGE
from tests.fake_fusion import FakeFusion

ROOT = Path(__file__).parents[3]
DIES = """
import asyncio, os, signal, sys
from rlscale.sandboxes.docker_sandbox import DockerSandbox
async def main():
    await DockerSandbox(image=sys.argv[1], url=sys.argv[2]).start()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def docker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("docker") / "docker.sock"
    command = [sys.executable, "-m", "tests.fake_docker", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield f"unix://{path}"
        process.kill()


@pytest.fixture
async def fusion() -> AsyncIterator[tuple[FakeFusion, str]]:
    fake = FakeFusion(SandboxLimits(max_output_bytes=2**20))
    async with TestServer(fake.app()) as server:
        yield fake, str(server.make_url(""))


def test_a_container_ends_with_the_run_that_was_killed(docker_url: str) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, IMAGE, docker_url], check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    client = APIClient(base_url=docker_url, version="auto")
    while client.containers():
        pass  # until the daemon has noticed it


async def test_a_container_whose_programs_cannot_be_killed_restarts(
    docker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with DockerSandbox(SandboxLimits(), image=IMAGE, url=docker_url) as sandbox:
        await sandbox.write("file", "x")
        # As with a program that uses up the process numbers: the daemon starts no further one.
        monkeypatch.setattr("rlscale.sandboxes.docker_sandbox._KILL", ["no-such-program"])
        monkeypatch.setattr("rlscale.sandboxes.docker_sandbox._KILL_TIMEOUT_S", 0.1)
        result = await sandbox.exec("sleep 1000", timeout_s=0.2)
        assert result.timed_out and "the sandbox was restarted, its files are gone" in result.stderr
        with pytest.raises(FileNotFoundError):
            await sandbox.read("file")
        assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_a_missing_image_and_a_missing_daemon_are_errors_with_the_reason(docker_url: str) -> None:
    for image, url, text in (("gone", docker_url, "No such image: gone"), (IMAGE, "unix:///gone.sock", "No such file")):
        with pytest.raises(SandboxError, match=text):
            await DockerSandbox(image=image, url=url).start()


def test_the_config_is_checked_with_the_daemon(docker_url: str) -> None:
    words = ["experiment=quickstart", "sandbox.kind=docker", "sandbox.memory_mb=128"]
    assert find_sandbox_fault(load_config([*words, f"sandbox.url={docker_url}"]).sandbox) is None
    gone = find_sandbox_fault(load_config([*words, "sandbox.url=unix:///gone.sock"]).sandbox)
    assert gone is not None and gone.startswith("a sandbox of docker did not start: ")


async def test_the_fake_service_answers_the_client_of_sandbox_fusion(fusion: tuple[FakeFusion, str]) -> None:
    request = sandbox_fusion.RunCodeRequest(
        code="print(open('in').read() + input())", language="python", files={"in": "aGk="}, stdin=" there"
    )
    answer = await sandbox_fusion.run_code_async(request, endpoint=fusion[1], max_attempts=1)
    assert answer.status == sandbox_fusion.RunStatus.Success and answer.run_result.stdout == "hi there\n"


async def test_errors_of_the_service_are_failures_of_the_sandbox(fusion: tuple[FakeFusion, str]) -> None:
    fake, url = fusion
    async with FusionSandbox(url=url) as sandbox:
        fake.broken = True
        with pytest.raises(SandboxError, match="no worker"):
            await sandbox.exec("true")
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.exec("true")
    with pytest.raises(SandboxError, match="no worker"):
        await FusionSandbox(url=url).start()
    with pytest.raises(SandboxError, match="did not start"):
        await FusionSandbox(url="http://127.0.0.1:1").start()


async def test_a_server_that_is_no_sandbox_service_is_an_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        sandbox = FusionSandbox(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(SandboxError, match="not an answer of SandboxFusion"):
            await sandbox.start()
        await sandbox.stop()


async def test_an_endless_answer_is_not_read() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b" " * 2**16)
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sandbox = FusionSandbox(
        SandboxLimits(disk_bytes=2**20), url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    )
    with pytest.raises(SandboxError, match="the answer is longer than"):
        await sandbox.start()
    await sandbox.stop()
    server.close()
