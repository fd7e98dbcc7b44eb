"""Measures the client of the engines with 10,000 requests in flight, compared with plain aiohttp.

A server in another process answers like an engine: the fake engine's HTTP server, with one answer that is ready. The
two clients run in this process, in turns, with the same requests. Each worker sends its next request when it has an
answer, so that the number in flight stays the same; it grows by 1,000 with every 1,000 answers at the start:

    rlscale    `HttpEngine.generate`: checks the request, retries, checks and converts the answer
    aiohttp    `session.post(json=...)` and `response.json()`, with one session and no limit of connections

Clients and server share the cores: the CPU time of a request in this process is what a client costs. The memory of this
process is compared between the two halves of the requests of rlscale. Writes `results/client_scale.md` and `.json`.

    python benchmarks/client_scale.py [--in-flight 10000] [--requests 20000] [--rounds 2] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from machine import busy_note, machine, sentence

from rlscale.engines.client.generate_messages import build_body
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeService, Faults
from rlscale.engines.server.engine_service import build_app
from rlscale.engines.server.generate_request import Answer, GenerateRequest, Limits, VersionSpan
from rlscale.engines.server.http_server import Server
from rlscale.types import EngineAddress, SamplingParams

RESULTS = Path(__file__).parent / "results"
VOCAB_SIZE = 150_000
TIMEOUT_S = 3600.0
LIMIT = 0.7
MEMORY_LIMIT = 1.05
NUM_MEMORY_SAMPLES = 40
RAMP = 1000
"""Workers that start at once, and again after as many answers."""

Send = Callable[[int], Awaitable[int]]
"""Sends a request by its number and returns the tokens of the answer."""


class ReadyService(FakeService):
    """A fake engine whose answer is ready: the server spends its time on HTTP alone."""

    async def generate(self, request: GenerateRequest) -> list[Answer]:
        number = request.params.max_new_tokens
        return [
            Answer(
                output_ids=[VOCAB_SIZE - 1 - i for i in range(number)],
                logprobs=[-0.123456789 - i / VOCAB_SIZE for i in range(number)],
                spans=[VersionSpan(version="0", start=0, end=number)],
                finish_reason={"type": "length", "length": number},
                weight_version="0",
                num_retractions=0,
                seconds=0.0,
                routes=None,
            )
        ] * request.n


async def serve() -> None:
    """Runs the server until it is ended, after a line with its URL."""
    limits = Limits(vocab_size=VOCAB_SIZE, max_context_len=2**20)
    server = Server(build_app(ReadyService(limits, Faults())), host="127.0.0.1", port=0)
    await server.start()
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    await server.run()


@contextmanager
def server_process() -> Iterator[str]:
    """URL of a server in another process."""
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def rlscale_client(url: str, options: argparse.Namespace) -> AsyncIterator[Send]:
    engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=TIMEOUT_S)
    prompt, params = tokens_of(options.prompt), SamplingParams(max_new_tokens=options.answer)

    async def send(number: int) -> int:
        (answer,) = await engine.generate(prompt, params, rid=f"train-{number}")
        return len(answer.output_ids)

    yield send
    await engine.close()


@asynccontextmanager
async def plain_client(url: str, options: argparse.Namespace) -> AsyncIterator[Send]:
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    body = build_body(tokens_of(options.prompt), SamplingParams(max_new_tokens=options.answer), None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(number: int) -> int:
            async with session.post(f"{url}/generate", json={**body, "rid": f"plain-{number}"}) as response:
                answer = await response.json()
                assert response.status == 200
            return len(answer["output_ids"])

        yield send


CLIENTS: dict[str, Any] = {"rlscale": rlscale_client, "aiohttp": plain_client}


def tokens_of(number: int) -> list[int]:
    return [VOCAB_SIZE - 1 - i for i in range(number)]


async def measure_client(name: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One round of one client."""
    num_done, memory = 0, []
    numbers = iter(range(options.requests))
    starts = [asyncio.Event() for _ in range(1 + max(options.requests, options.in_flight) // RAMP)]
    async with CLIENTS[name](url, options) as send:

        async def work(worker: int) -> None:
            nonlocal num_done
            # Later workers start when answers arrive: the server's queue of new connections is short.
            if worker >= RAMP:
                await starts[worker // RAMP].wait()
            for number in numbers:
                assert await send(number) == options.answer
                num_done += 1
                if num_done % RAMP == 0:
                    starts[num_done // RAMP].set()
                if num_done % max(1, options.requests // NUM_MEMORY_SAMPLES) == 0:
                    memory.append(resident_bytes())

        began, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(work, range(options.in_flight)))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    assert num_done == options.requests
    return {"client": name, "wall_s": wall_s, "cpu_s": cpu_s, "memory": memory}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every round of every client, in turns."""
    runs = []
    with server_process() as url:
        few = argparse.Namespace(**{**vars(options), "requests": 20, "in_flight": 2})
        for name in CLIENTS:
            asyncio.run(measure_client(name, url, few))  # imports modules
        for _ in range(options.rounds):
            runs += [asyncio.run(measure_client(name, url, options)) for name in CLIENTS]
    return runs


def summarise(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Rates, their ratios by round, and the growth of memory between the halves of the requests of rlscale."""
    sides = {name: [run for run in runs if run["client"] == name] for name in CLIENTS}
    pairs = list(zip(sides["rlscale"], sides["aiohttp"], strict=True))
    samples = [bytes_ for run in sides["rlscale"] for bytes_ in run["memory"]]
    half = len(samples) // 2
    return {
        "requests_per_s": {
            name: statistics.median(options.requests / run["wall_s"] for run in side) for name, side in sides.items()
        },
        "cpu_us": {
            name: statistics.median(1e6 * run["cpu_s"] / options.requests for run in side)
            for name, side in sides.items()
        },
        "ratio": statistics.median(plain["wall_s"] / ours["wall_s"] for ours, plain in pairs),
        "cpu_ratio": statistics.median(plain["cpu_s"] / ours["cpu_s"] for ours, plain in pairs),
        "memory_bytes": [max(samples[:half]), max(samples[half:])],
    }


def report(summary: dict[str, Any], options: argparse.Namespace, load: float) -> str:
    lines = ["| client | requests/s | CPU of a request, us |", "|---|---|---|"]
    for name in CLIENTS:
        lines.append(f"| {name} | {summary['requests_per_s'][name]:,.0f} | {summary['cpu_us'][name]:,.0f} |")
    first, second = summary["memory_bytes"]
    description = (__doc__ or "").split("Writes `")[0].strip()
    return (
        f"# Requests in flight\n\n{description}\n\n{sentence([load])} {options.in_flight:,} requests in flight, "
        f"prompts of {options.prompt} tokens, answers of {options.answer}; medians of {options.rounds} rounds of "
        f"{options.requests:,} requests. {busy_note(load)}Made by "
        "`python benchmarks/client_scale.py`.\n\n"
        + "\n".join(lines)
        + f"\n\nrlscale reaches {summary['ratio']:.2f} of the requests/s of aiohttp (target: at least {LIMIT:g}); by "
        f"CPU time {summary['cpu_ratio']:.2f}. Peak memory of the process: {first / 1e6:.0f} MB in the first half "
        f"of the requests of rlscale, {second / 1e6:.0f} MB in the second (ratio {second / first:.3f}; target: at most "
        f"{MEMORY_LIMIT:g}).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=20_000, help="of a client in a round")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--serve", action="store_true", help="runs the server")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    load = os.getloadavg()[0]
    runs = measure(options)
    summary = summarise(runs, options)
    text = report(summary, options, load)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "client_scale.md").write_text(text)
        content = {"machine": machine(), "load": load, "summary": summary, "runs": runs}
        (RESULTS / "client_scale.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
