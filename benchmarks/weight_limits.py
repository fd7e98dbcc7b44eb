"""Raw rates to compare `weight_channels.py` with: a memcpy, and a gloo broadcast to another process."""

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from rlscale.weight_types import WeightGroup
from rlscale.weights.torch_groups import join_group, leave_group, open_store, start_broadcast

RAW_BYTES = 512 * 2**20  # of one raw broadcast
TIMEOUT_S = 300.0


def memcpy(num_bytes: int, *, num_threads: int) -> Callable[[], None]:
    """Returns a function that calls libc's memcpy once in each thread of this process, in parallel."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    # Bytes of one thread, rounded up; the last thread copies the rest.
    share = -(-num_bytes // num_threads)
    pool = ThreadPoolExecutor(num_threads)

    def copy(start: int) -> None:
        size = min(share, num_bytes - start)
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, size)

    def run() -> None:
        list(pool.map(copy, range(0, num_bytes, share)))

    return run


@contextmanager
def gloo_broadcast(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Yields a broadcast to a process that only receives, over a group that is built as the channel builds it."""
    store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
    with _peer(store.port, num_bytes):
        group = join_group(_group_at(store.port), 0, store=store)
        flat = torch.ones(num_bytes, dtype=torch.uint8)

        def run() -> None:
            for piece in flat.split(RAW_BYTES):
                start_broadcast(group, piece).wait()
            # A broadcast ends on the sender when its bytes have left; the barrier waits for the receiver.
            group.barrier().wait()

        try:
            yield run
        finally:
            leave_group(group)


def _receive(port: int, num_bytes: int) -> None:
    group = join_group(_group_at(port), 1)
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    while True:
        for piece in flat.split(RAW_BYTES):
            start_broadcast(group, piece).wait()
        group.barrier().wait()


def _group_at(port: int) -> WeightGroup:
    return WeightGroup(
        name="raw", master_address="127.0.0.1", master_port=port, world_size=2, backend="gloo", timeout_s=TIMEOUT_S
    )


@contextmanager
def _peer(*arguments: int) -> Iterator[None]:
    command = [sys.executable, __file__, *map(str, arguments)]
    peer = subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    try:
        yield
    finally:
        peer.kill()
        peer.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Receives raw broadcasts until it is killed.")
    parser.add_argument("port", type=int)
    parser.add_argument("num_bytes", type=int)
    arguments = parser.parse_args()
    _receive(arguments.port, arguments.num_bytes)
