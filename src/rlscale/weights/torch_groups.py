"""Process groups between a trainer and engines, which are not in each other's default group."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from rlscale.weight_types import WeightGroup

Group = dist.ProcessGroup | dist.ProcessGroupGloo


def open_store(address: str, *, timeout_s: float) -> TCPStore:
    """Opens the store at which the members of a group rendezvous; listens on `address` only, on a free port."""
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
    """Joins `group` as `rank`, independent of the default group; returns once all members have joined.

    Rank 0 passes the store it opened. The construction is SGLang's, so that a real server can join: a TCP store, a
    prefix with the group's name, and torch's own construction of a group over it.

    Raises RuntimeError (torch.distributed's subclasses) when the others do not join within `group.timeout_s`.
    """
    timeout = timedelta(seconds=group.timeout_s)
    if store is None:
        store = TCPStore(group.master_address, group.master_port, timeout=timeout, wait_for_workers=False)
    if group.num_links > 1:
        return _join_multi_link(group, rank, store)
    # torch.distributed.new_group makes subgroups of the default group only, hence the private helper.
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


def _join_multi_link(group: WeightGroup, rank: int, store: TCPStore) -> dist.ProcessGroupGloo:
    """Joins a bare gloo group of several links, each with its own connection and thread.

    gloo's rate over one connection is that of one thread that copies into a socket.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=group.timeout_s)
    options._devices = [_make_device(interface) for _ in range(group.num_links)]
    options._threads = 2 * group.num_links
    return dist.ProcessGroupGloo(c10d.PrefixStore(group.name, store), rank, group.world_size, options)


def _make_device(interface: str) -> dist.ProcessGroupGloo.Device:
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def start_broadcast(process_group: Group, tensor: Tensor) -> dist.Work:
    """Starts a broadcast of `tensor` from rank 0 to all members (a collective of the group); returns at once."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work: dist.Work = process_group.broadcast([tensor], options)  # type: ignore[union-attr]
    return work


def leave_group(process_group: Group) -> None:
    """Destroys this member's end of a group; the others notice at their next operation."""
    # A bare group is not registered with torch.distributed: it ends with its last reference.
    if isinstance(process_group, dist.ProcessGroup):
        dist.destroy_process_group(process_group)
