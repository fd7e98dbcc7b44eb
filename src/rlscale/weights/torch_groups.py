"""A process group between a trainer and engines, which are no part of each other's world."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from rlscale.types import WeightGroup

Group = dist.ProcessGroup | dist.ProcessGroupGloo


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


def join_group(group: WeightGroup, rank: int, *, store: TCPStore | None = None) -> Group:
    """Joins `group` as `rank`, beside the default group and independent of it; returns once all have joined.

    Rank 0 brings the store it opened. The way is SGLang's, which a real server must be able to join: a TCP store, a
    prefix with the group's name, and torch's own construction of a group over it.

    Raises RuntimeError (torch.distributed's own kinds) when the others do not come within `group.timeout_s`.
    """
    timeout = timedelta(seconds=group.timeout_s)
    if store is None:
        store = TCPStore(group.master_address, group.master_port, timeout=timeout, wait_for_workers=False)
    if group.num_links > 1:
        return _join_linked(group, rank, store)
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


def _join_linked(group: WeightGroup, rank: int, store: TCPStore) -> dist.ProcessGroupGloo:
    """A bare gloo group of several links, each with a connection and a thread of its own.

    gloo's rate over one connection is that of one thread that copies into a socket.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=group.timeout_s)
    options._devices = [_device(interface) for _ in range(group.num_links)]
    options._threads = 2 * group.num_links
    return dist.ProcessGroupGloo(c10d.PrefixStore(group.name, store), rank, group.world_size, options)


def _device(interface: str) -> dist.ProcessGroupGloo.Device:
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def start_broadcast(process_group: Group, tensor: Tensor) -> dist.Work:
    """Sends `tensor` from rank 0 to all members, or receives it. All members take part; returns at once."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work: dist.Work = process_group.broadcast([tensor], options)  # type: ignore[union-attr]
    return work


def leave_group(process_group: Group) -> None:
    """Forgets a group; the others notice at their next operation."""
    if isinstance(process_group, dist.ProcessGroup):
        dist.destroy_process_group(process_group)  # a bare one is known to its owner alone
