"""A process group between a trainer and engines, which are no part of each other's world."""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from rlscale.types import WeightGroup


def open_store(address: str, *, timeout_s: float) -> TCPStore:
    """The store over which the members of a group find each other; listens on `address` alone, on a free port."""
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_group(group: WeightGroup, rank: int, *, store: TCPStore | None = None) -> dist.ProcessGroup:
    """Joins `group` as `rank`, beside the default group and independent of it; returns once all have joined.

    Rank 0 brings the store it opened. The way is SGLang's, which a real server must be able to join: a TCP store, a
    prefix with the group's name, and torch's own construction of a group over it.

    Raises RuntimeError (torch.distributed's own kinds) when the others do not come within `group.timeout_s`.
    """
    timeout = timedelta(seconds=group.timeout_s)
    if store is None:
        store = TCPStore(group.master_address, group.master_port, timeout=timeout, wait_for_workers=False)
    process_group: dist.ProcessGroup
    process_group, _ = c10d._new_process_group_helper(
        group.world_size,
        rank,
        [],
        c10d.Backend(group.backend),
        c10d.PrefixStore(group.name, store),
        group_name=c10d.GroupName(group.name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[process_group] = {i: i for i in range(group.world_size)}
    return process_group


def start_broadcast(process_group: dist.ProcessGroup, tensor: Tensor) -> dist.Work:
    """Sends `tensor` from rank 0 to all members, or receives it. All members take part; returns at once."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work: dist.Work = process_group.broadcast([tensor], options)
    return work


def leave_group(process_group: dist.ProcessGroup) -> None:
    """Forgets a group; the others notice at their next operation."""
    dist.destroy_process_group(process_group)
