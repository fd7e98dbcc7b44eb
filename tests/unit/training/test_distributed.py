"""Process group, device and CPU threads of a world of one rank."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlscale.training.distributed import find_local_ranks, select_device, set_num_threads

pytestmark = pytest.mark.usefixtures("world")


def listening_addresses() -> set[str]:
    """Local addresses of this process's listening TCP sockets, in the format of /proc."""
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            # State 0A is LISTEN; the inode identifies sockets of this process.
            if state == "0A" and f"socket:[{inode}]" in inodes:
                found.add(local.split(":")[0])
    return found


def test_a_world_of_one_rank_exists() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert find_local_ranks() == (0, 1)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux' table of sockets")
def test_it_listens_on_loopback_only() -> None:
    assert listening_addresses() <= {"0100007F", "00000000000000000000000001000000"}


def test_threads_are_shared_among_the_ranks_of_a_node() -> None:
    before = torch.get_num_threads()
    try:
        assert set_num_threads(3, num_local_ranks=8) == 3 == torch.get_num_threads()
        assert set_num_threads(None, num_local_ranks=10_000) == 1
        assert set_num_threads(None, num_local_ranks=1) == len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)


def test_the_cpu_is_a_device_and_auto_finds_it() -> None:
    assert select_device("cpu", local_rank=3) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert select_device("auto", local_rank=0) == torch.device("cpu")


@pytest.mark.slow
def test_the_gradient_of_an_indexing_is_deterministic_with_two_threads() -> None:
    """Sums in the order of the threads would make a resumed run differ."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(16, 512, generator=generator)
    rows = torch.randint(16, (4096,), generator=generator)
    weights = torch.randn(4096, 512, generator=generator)

    def gradient() -> torch.Tensor:
        leaf = table.clone().requires_grad_()
        (leaf[rows] * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    try:
        set_num_threads(2, num_local_ranks=1)
        first = gradient()
        assert all(torch.equal(first, gradient()) for _ in range(20))
    finally:
        torch.set_num_threads(before)
