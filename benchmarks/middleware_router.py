"""Measures the middleware router with 10,000 live sessions: time and memory of a session must not grow.

Two engines in another process answer at once, so that the time is that of the router. It is a process with
`RadixTreeMiddleware` and `router.policy=consistent_hashing`, as a run starts it. Sessions are opened in steps of 2,000;
each sends two requests as text, the second of which extends the first answer, and stays live. At the end the oldest
2,000 sessions send a third request. Each request must get the tokens that the cache has of its session, on one engine.

The CPU time is that of the router's process, the memory its resident set after each step. Writes
`results/middleware_router.md` and `.json`.

    python benchmarks/middleware_router.py [--sessions 10000] [--steps 5] [--concurrency 16] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from machine import machine, sentence

from rlscale.config import RouterConfig, RouterPolicy
from rlscale.engines.client.http_connection import ROUTING_KEY
from rlscale.engines.middleware_router.middleware_launch import MiddlewareRouterLaunch
from rlscale.engines.server.http_server import Server
from rlscale.engines.sglang.router_process import RouterProcess
from rlscale.models.char_tokenizer import EOS, VOCABULARY, character_tokenizer
from rlscale.types import EngineAddress

RESULTS = Path(__file__).parent / "results"
CACHE = "rlscale.engines.middleware_router.radix_tree_middleware:RadixTreeMiddleware"
READY_S = 300.0
ANSWER = "The answer of the engine to this prompt: 42."
LIMIT = 1.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def serve(num: int) -> None:
    """Runs engines until they are ended, after a line with the URL of each."""
    ids = [*(VOCABULARY.index(each) for each in ANSWER), VOCABULARY.index(EOS)]
    entries = [[-0.123456789 - i / 100, each, None] for i, each in enumerate(ids)]
    servers = []
    for number in range(num):

        async def generate(request: web.Request, number: int = number) -> web.Response:
            body = await request.json()
            meta = {
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "output_token_logprobs": entries,
                "weight_version": "0",
                "engine": number,
                "prompt_tokens": len(body["input_ids"]),
            }
            return web.json_response({"text": ANSWER, "output_ids": ids, "meta_info": meta})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.get("/health", health)])
        servers.append(Server(app, host="127.0.0.1", port=0))
        await servers[-1].start()
        sys.stdout.write(servers[-1].url + "\n")
    sys.stdout.flush()
    await asyncio.gather(*[server.run() for server in servers])


@contextmanager
def engine_urls(num: int) -> Iterator[list[str]]:
    """URLs of engines in another process."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(num)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield [process.stdout.readline().strip() for _ in range(num)]
    finally:
        process.kill()  # each of its servers would handle SIGTERM
        process.wait()


@contextmanager
def router_process(urls: Sequence[str], folder: Path) -> Iterator[RouterProcess]:
    """A router that is ready."""
    character_tokenizer(4096).save_pretrained(str(folder / "model"))
    config = RouterConfig(
        policy=RouterPolicy.consistent_hashing, timeout_s=600, max_connections=20_000, middleware_paths=[CACHE]
    )
    launch = MiddlewareRouterLaunch(config=config, model_path=str(folder / "model"))
    workers = [EngineAddress(name=f"engine {i}", url=url) for i, url in enumerate(urls)]
    _, process = launch.open(folder, workers)
    process.start()
    try:
        process.wait_ready(READY_S)
        yield process
    finally:
        process.stop()


class Session:
    """One conversation. Every request must get the tokens of all turns before it, from one engine."""

    def __init__(self, number: int) -> None:
        self.key = f"train-{number}"
        self.text = f"Session {number:06d} asks about its own subject, {number * 7919 % 10007}. " + "Explain. " * 20
        self.num_tokens = len(self.text)
        self.engine: int | None = None

    async def send(self, client: aiohttp.ClientSession, url: str) -> float:
        """The seconds of one request."""
        body = {"text": self.text, "sampling_params": {"max_new_tokens": 64}}
        began = time.perf_counter()
        async with client.post(f"{url}/generate", json=body, headers={ROUTING_KEY: self.key}) as response:
            answer = await response.json()
            assert response.status == 200, answer
        seconds = time.perf_counter() - began
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == self.num_tokens and self.engine in (None, meta["engine"])
        self.engine = meta["engine"]
        self.text += f"{ANSWER}{EOS}And then? "
        # A character is a token, but for the end token.
        self.num_tokens += len(ANSWER) + 1 + len("And then? ")
        return seconds


async def send_all(sessions: Sequence[Session], turns: int, url: str, concurrency: int) -> list[float]:
    """Seconds of each request of some sessions, with so many sessions at the same time."""
    waiting, seconds = iter(sessions), list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def work() -> None:
            for session in waiting:
                for _ in range(turns):
                    seconds.append(await session.send(client, url))

        await asyncio.gather(*[work() for _ in range(concurrency)])
    return seconds


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def statistics_of(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.get(f"{url}/statistics") as response:
        found: dict[str, Any] = await response.json()
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The steps, each with the cost of its requests and the memory after it, and the counts of the router."""
    per_step, steps, sessions = options.sessions // options.steps, list[dict[str, float]](), list[Session]()
    with tempfile.TemporaryDirectory() as folder, engine_urls(2) as urls, router_process(urls, Path(folder)) as router:
        assert router.pid is not None
        warm = [Session(10**6 + i) for i in range(200)]
        asyncio.run(send_all(warm, 2, router.url, options.concurrency))

        def step(name: str, chosen: Sequence[Session], turns: int) -> None:
            before, began, used = resident_bytes(router.pid), time.perf_counter(), cpu_s(router.pid)
            seconds = asyncio.run(send_all(chosen, turns, router.url, options.concurrency))
            wall = time.perf_counter() - began
            steps.append(
                {
                    "name": name,
                    "sessions": len(sessions),
                    "requests": len(seconds),
                    "requests_per_s": len(seconds) / wall,
                    "cpu_ms": 1000 * (cpu_s(router.pid) - used) / len(seconds),
                    "median_ms": 1000 * sorted(seconds)[len(seconds) // 2],
                    "memory_bytes": resident_bytes(router.pid),
                    "bytes_per_session": (resident_bytes(router.pid) - before) / len(chosen),
                }
            )

        for number in range(options.steps):
            new = [Session(number * per_step + i) for i in range(per_step)]
            sessions += new
            step("new sessions", new, 2)
        step("third request of the oldest", sessions[:per_step], 1)
        counts = asyncio.run(statistics_of(router.url))
    return {"steps": steps, "statistics": counts}


def report(found: dict[str, Any], options: argparse.Namespace, load: float) -> str:
    lines = [
        "| live sessions | requests | CPU of a request, ms | median, ms | requests/s | memory, MB | KB per session |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in found["steps"]:
        lines.append(
            f"| {step['sessions']:,} | {step['requests']:,}, {step['name']} | {step['cpu_ms']:.2f} | "
            f"{step['median_ms']:.0f} | {step['requests_per_s']:,.0f} | {step['memory_bytes'] / 1e6:.0f} | "
            f"{step['bytes_per_session'] / 1e3:.1f} |"
        )
    opened = [step for step in found["steps"] if step["name"] == "new sessions"]
    first, last = opened[min(1, len(opened) - 1)], opened[-1]
    tree, router = found["statistics"]["radix_tree"], found["statistics"]["router"]
    description = (__doc__ or "").split("Writes\n`")[0].strip()
    return (
        f"# The middleware router with many sessions\n\n{description}\n\n{sentence([load])} Other work ran on the "
        f"machine, so times say little; {options.concurrency} requests at the same time. Made by "
        "`python benchmarks/middleware_router.py`.\n\n"
        + "\n".join(lines)
        + f"\n\nFrom {first['sessions']:,} to {last['sessions']:,} sessions the CPU time of a request changes by a "
        f"factor of {last['cpu_ms'] / first['cpu_ms']:.2f} and the memory of a session by "
        f"{last['bytes_per_session'] / first['bytes_per_session']:.2f} (target: at most {LIMIT:g}). The cache has "
        f"{tree['num_entries']:,} entries with {tree['num_tokens']:,} tokens; {tree['num_hits']:,} of "
        f"{tree['num_hits'] + tree['num_misses']:,} texts had a cached prefix. {router['num_session_hits']:,} of "
        f"{router['num_session_requests']:,} requests went to the engine of their session.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--serve", type=int, default=0, help="runs so many engines")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    load = os.getloadavg()[0]
    found = measure(options)
    text = report(found, options, load)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "middleware_router.md").write_text(text)
        content = {"machine": machine(), "load": load, **found}
        (RESULTS / "middleware_router.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
