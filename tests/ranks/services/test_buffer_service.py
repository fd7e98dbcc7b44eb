"""The rollout buffer over HTTP: keys, refusals, announcements, waiting readers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rlscale.errors import ServiceError
from rlscale.services.buffer_client import BufferAddress, BufferClient, find_buffer_fault
from tests.buffer_process import BufferProcess, call, trajectory

KEY = "a-key-of-the-test"
TASK = {"task_type": "math", "group_size": 2, "vocab_size": 10, "max_tokens": 6}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    with BufferProcess(tmp_path_factory.mktemp("buffer"), api_key=KEY) as process:
        yield process


def refusal(url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, data, given), timeout=30)
    return caught.value.code, json.load(caught.value)["error"]


def client(service: BufferProcess, reader: str, **task: Any) -> BufferClient:
    address = BufferAddress(url=service.url, api_key=KEY)
    return BufferClient(address, reader=reader, announce=lambda: TASK | task, max_retries=0)


def test_requests_need_the_key_and_web_pages_are_refused(service: BufferProcess) -> None:
    url = f"{service.url}/trajectories"
    for key in ("", "Bearer ", f"Bearer {KEY}x", KEY):
        assert refusal(url, trajectory("k", "k"), Authorization=key)[0] == 401
    assert refusal(url, trajectory("k", "k"), Origin="http://example.org") == (403, "requests of web pages are refused")
    status, message = refusal(url, trajectory("k", "k"), **{"Content-Type": "text/plain"})
    assert (status, message) == (415, "the header Content-Type must be application/json")
    with urllib.request.urlopen(f"{service.url}/health", timeout=30) as response:
        assert response.status == 200
    assert asyncio.run(find_buffer_fault(BufferAddress(url=service.url), task_type="math")) == (
        "it refuses the key; set RLSCALE_BUFFER_API_KEY to that of the service"
    )


def test_a_reader_waits_for_a_group_and_its_limits_hold_for_submissions(service: BufferProcess) -> None:
    url = f"{service.url}/trajectories"
    assert refusal(f"{service.url}/task?task_type=wait")[0] == 404

    async def read() -> list[dict[str, Any]]:
        reading = asyncio.create_task(client(service, "waits", task_type="wait").next_groups(position=0, number=4))
        while True:
            try:
                announced = await asyncio.to_thread(call, f"{service.url}/task?task_type=wait", key=KEY)
                break
            except urllib.error.HTTPError:  # the run has not announced its task yet
                await asyncio.sleep(0.01)
        assert announced["group_size"] == 2
        for body, message in (
            (trajectory("w-0", "w", group_size=3), "group_size must be 2, the run's batch.n_samples_per_prompt, got 3"),
            (trajectory("w-0", "w", response_ids=[3, 4, 10]), "token ids must be below 10"),
            (
                trajectory("w-0", "w", prompt={"token_ids": [1, 2, 3, 4]}),
                "prompt and response must have at most 6 tokens, got 7; shorten it",
            ),
        ):
            status, text = await asyncio.to_thread(refusal, url, body | {"task_type": "wait"})
            assert status == 422 and text.startswith(message)
        both = [trajectory(f"w-{i}", "w", task_type="wait") for i in range(2)]
        assert await asyncio.to_thread(call, url, both, key=KEY) == {"accepted": 2, "new": 2}
        assert await asyncio.to_thread(call, url, both, key=KEY) == {"accepted": 2, "new": 0}
        return await reading

    (group,) = asyncio.run(asyncio.wait_for(read(), 60))
    assert (group["position"], group["name"]) == (0, "w")
    assert [each["id"] for each in group["trajectories"]] == ["w-0", "w-1"]
    assert asyncio.run(client(service, "waits").groups_at([0])) == [group]
    status, text = refusal(url, trajectory("w-2", "w", task_type="wait"))
    assert status == 409 and text.endswith("which is complete; use another group")


def test_a_call_that_is_refused_or_not_answered_ends_with_one_line(service: BufferProcess) -> None:
    with pytest.raises(ServiceError, match="refused /groups/next: position must be at most 0"):
        asyncio.run(client(service, "other file").next_groups(position=7, number=1))
    address = BufferAddress(url="http://127.0.0.1:9")
    lost = BufferClient(address, reader="x", announce=lambda: TASK, max_retries=1)
    with pytest.raises(ServiceError, match=r"buffer\.url=http://127\.0\.0\.1:9 must answer, .* after .*=1 retries"):
        asyncio.run(lost.next_groups(position=0, number=1))
