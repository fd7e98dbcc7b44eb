"""Measures the rollout buffer with 100,000 trajectories: memory and time of each must not grow with their number.

The service runs in another process. First a producer submits all trajectories, a group of 8 at a time; then a run reads
all of them, 64 groups at a time, with the client that runs use. After each tenth the processor time of the service, the
elapsed time and its memory are noted. The growth is that of the last tenth compared with the second one: in the first
one the service still loads its code. Writes `results/buffer_service.md` and `.json`.

    python benchmarks/buffer_service.py [--trajectories 100000] [--tokens 256] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine, sentence

from rlscale.services.buffer_client import BufferAddress, BufferClient

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.buffer_process import BufferProcess, trajectory

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE, NUM_READ, NUM_PARTS = 8, 64, 10
LIMIT = 1.1
TICKS = os.sysconf("SC_CLK_TCK")


def usage(pid: int) -> tuple[float, float]:
    """Processor seconds and resident MiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    memory = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return (int(fields[11]) + int(fields[12])) / TICKS, int(memory.split()[1]) / 1024


def measure(pid: int, work: Callable[[], None], number: int) -> dict[str, float]:
    """Costs of one tenth of the trajectories, each."""
    cpu_s, _ = usage(pid)
    began_s = time.perf_counter()
    work()
    after_s, memory_mib = usage(pid)
    seconds = time.perf_counter() - began_s
    return {"cpu_us": 1e6 * (after_s - cpu_s) / number, "us": 1e6 * seconds / number, "memory_mib": memory_mib}


def groups(part: int, number: int, num_tokens: int) -> Iterator[bytes]:
    """The bodies of the submissions of one tenth."""
    columns = {
        "prompt": {"token_ids": list(range(num_tokens // 2))},
        "response_ids": list(range(num_tokens // 2)),
        "logprobs": [-0.123456789 - i / num_tokens for i in range(num_tokens // 2)],
        "group_size": GROUP_SIZE,
    }
    for index in range(number // GROUP_SIZE):
        name = f"{part}-{index}"
        yield json.dumps([trajectory(f"{name}-{i}", name, **columns) for i in range(GROUP_SIZE)]).encode()


def submit(port: int, bodies: Iterator[bytes]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for body in bodies:
        connection.request("POST", "/trajectories", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status == 200, text
    connection.close()


async def read(url: str, first: int, last: int) -> None:
    task: dict[str, Any] = {"task_type": "math", "group_size": GROUP_SIZE}
    client = BufferClient(BufferAddress(url=url), reader="run", announce=lambda: task, max_retries=0)
    position = first
    while position < last:
        position += len(await client.next_groups(position=position, number=min(NUM_READ, last - position)))


def run(num_trajectories: int, num_tokens: int) -> dict[str, Any]:
    number = num_trajectories // NUM_PARTS
    per_part = number // GROUP_SIZE
    with tempfile.TemporaryDirectory() as folder, BufferProcess(Path(folder)) as service:
        port = int(service.url.rpartition(":")[2])
        submitted = [
            measure(service.pid, lambda part=part: submit(port, groups(part, number, num_tokens)), number)
            for part in range(NUM_PARTS)
        ]
        delivered = [
            measure(
                service.pid,
                lambda part=part: asyncio.run(read(service.url, part * per_part, (part + 1) * per_part)),
                number,
            )
            for part in range(NUM_PARTS)
        ]
        num_bytes = sum(each.stat().st_size for each in Path(folder).glob("buffer.sqlite3*"))
    return {"submitted": submitted, "delivered": delivered, "file_bytes_each": num_bytes / num_trajectories}


def growth(rows: list[dict[str, float]], name: str) -> float:
    # A short trial run may take less than a tick of the clock.
    return rows[-1][name] / max(rows[1][name], 1e-9)


def report(found: dict[str, Any], args: argparse.Namespace, loads: list[float]) -> str:
    lines = [
        "# The rollout buffer with many trajectories",
        "",
        *(__doc__ or "").split("\n\n    python")[0].splitlines(),
        "",
        f"{sentence(loads)} {args.trajectories:,} trajectories of {args.tokens} tokens; "
        f"{found['file_bytes_each']:,.0f} bytes each in the file. Other work ran on the machine, which the elapsed "
        "times show more than the processor times. Made by `python benchmarks/buffer_service.py`.",
    ]
    for title, key in (("Submitted", "submitted"), ("Delivered", "delivered")):
        lines += [
            "",
            f"## {title}",
            "",
            "| trajectories | CPU of each, us | elapsed, us | memory, MiB |",
            "|---|---|---|---|",
        ]
        for part, row in enumerate(found[key], start=1):
            count = args.trajectories * part // NUM_PARTS
            lines.append(f"| {count:,} | {row['cpu_us']:.0f} | {row['us']:.0f} | {row['memory_mib']:.0f} |")
        cpu, memory = growth(found[key], "cpu_us"), growth(found[key], "memory_mib")
        lines += ["", f"Growth: CPU {cpu:.2f}, memory {memory:.2f} (target: at most {LIMIT} each)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dry", action="store_true", help="print the results and write nothing")
    args = parser.parse_args()
    loads = [os.getloadavg()[0]]
    found = run(args.trajectories, args.tokens)
    loads.append(os.getloadavg()[0])
    text = report(found, args, loads)
    sys.stdout.write(text)
    if not args.dry:
        (RESULTS / "buffer_service.md").write_text(text)
        (RESULTS / "buffer_service.json").write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
