"""A request that runs for long enough to be interrupted, and the engine's loop as seen over HTTP."""

import asyncio
from collections.abc import Generator
from typing import Any

from tests.contract.conftest import Wire

PROMPT = [5, 9, 33, 7]
NUM_STEPS = 20


class LongRequest:
    """A streamed request, so that its progress can be seen. Awaiting it gives status and answer, as of a plain one."""

    def __init__(self, wire: Wire, rid: str) -> None:
        params = {"max_new_tokens": wire.target.long_answer, "ignore_eos": True, "sampling_seed": 5}
        self._body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "rid": rid}
        self.num_tokens = 0
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._read(wire))

    async def _read(self, wire: Wire) -> tuple[int, Any]:
        last = None
        try:
            async for event in wire.stream(self._body):
                if event != "[DONE]":
                    last, self.num_tokens = event, len(event["output_ids"])
                    self._arrived.set()
        finally:
            self._arrived.set()
        return 200, last

    def __await__(self) -> Generator[Any, None, tuple[int, Any]]:
        return self.task.__await__()

    async def wait_for_tokens(self, number: int) -> None:
        """Waits until it has so many tokens, and still runs."""
        while self.num_tokens < number:
            self._arrived.clear()
            await self._arrived.wait()
            assert not self.task.done(), f"the request must still run, got {self.task.result()}"


async def start_long(wire: Wire, rid: str) -> LongRequest:
    """Starts a request; returns once it has some of its tokens."""
    request = LongRequest(wire, rid)
    await request.wait_for_tokens(3)
    return request


async def num_running(wire: Wire) -> int:
    return int((await wire.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"])


async def wait_for_arrival(wire: Wire, *, before: int) -> None:
    """Waits until an engine that held `before` requests holds another one, running or not.

    SGLang keeps it outside of its scheduler and does not count it: there only calls that are sent later, as those of
    `pass_steps`, show that it had time to arrive.
    """
    while wire.target.counts_held and await num_held(wire) <= before:
        await asyncio.sleep(0)


async def num_held(wire: Wire) -> int:
    """Number of requests that the engine holds, running or not."""
    load = (await wire.get("/v1/loads"))[1]["loads"][0]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


async def pass_steps(wire: Wire) -> None:
    """Returns after several rounds of the engine's loop; it could have decoded in each.

    Both calls run between two steps: the first in the embedded engine, the second in SGLang's scheduler. The fake has
    no loop; it generates a token in about the time of a call.
    """
    for _ in range(NUM_STEPS):
        assert (await wire.post("/abort_request", {"rid": "no-such-request"}))[0] == 200
        await num_running(wire)


async def check_paused(wire: Wire, request: LongRequest) -> None:
    """Checks that an engine, which was paused, generates no tokens of a request."""
    await pass_steps(wire)  # events of the last step before the pause may still arrive
    num_tokens = request.num_tokens
    await pass_steps(wire)
    assert request.num_tokens == num_tokens < wire.target.long_answer
