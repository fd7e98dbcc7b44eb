"""The process group of the trainer ranks, the device of a rank, and its share of the cores."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlscale.training.listener import listen
from rlscale.training.packing.context_parallel import ContextGroup

DATA_AXIS, CONTEXT_AXIS = "data", "context"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGrid:
    """The ranks as a grid: those of a row share their samples, those of a column have different ones.

    Parameters and gradients are sharded over all of them (`data_mesh`).
    """

    data_index: int  # row of this rank: which share of a step's samples it has
    data_group: dist.ProcessGroup | None = None  # its column; None: all ranks
    context: ContextGroup | None = None  # its row; None: it is alone in it

    @classmethod
    def from_context_size(cls, device: torch.device, *, context_size: int) -> RankGrid:
        """A collective. Ranks that follow each other make a row: they lie on one machine, and exchange the most."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if context_size == 1:
            return cls(data_index=rank)
        assert world_size % context_size == 0, f"a rule lets {context_size} divide {world_size} ranks"
        shape = (world_size // context_size, context_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS))
        data_index, index = divmod(rank, context_size)
        context = ContextGroup(index=index, size=context_size, group=mesh.get_group(CONTEXT_AXIS))
        return cls(data_index=data_index, data_group=mesh.get_group(DATA_AXIS), context=context)


def join_world(
    rank: int, world_size: int, master_address: str, master_port: int | socket.socket, backend: str, timeout_s: float
) -> None:
    """Makes the default process group; returns once all ranks have joined.

    Args:
        rank: of this process, 0 is the one that listens.
        world_size: number of ranks.
        master_address: host name or address of rank 0; it listens there and on no other interface.
        master_port: free port of that host; 0 picks one, for a world of one rank. On rank 0 also the socket that
            listens there already, which belongs to the world from then on. Under torchrun that of `MASTER_PORT`, where
            torchrun listens itself.
        backend: "gloo", or "nccl" (which gets gloo beside it for tensors on the CPU).
        timeout_s: seconds to wait for the others, now and in every collective.
    """
    assert world_size > 0 and 0 <= rank < world_size, f"rank {rank} is not in a world of {world_size}"
    assert master_port != 0 or world_size == 1, "several ranks need to know the port"
    timeout = timedelta(seconds=timeout_s)
    if _is_loopback(master_address):
        # Gloo listens on the interface that the host's name resolves to, unless it is told otherwise.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    store: Store
    if isinstance(master_port, int) and _is_kept_by_torchrun(master_port):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"world/{attempt}", TCPStore(master_address, master_port, timeout=timeout))
    else:
        store = _store(rank, world_size, master_address, master_port, timeout=timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _store(
    rank: int, world_size: int, master_address: str, master_port: int | socket.socket, *, timeout: timedelta
) -> TCPStore:
    """The store of a world whose rank 0 keeps it."""
    listener = None
    if rank == 0:
        listener = listen(master_address, port=master_port) if isinstance(master_port, int) else master_port
        master_port = int(listener.getsockname()[1])
    assert isinstance(master_port, int), "rank 0 is the one that listens"
    return TCPStore(
        master_address,
        master_port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listener.detach() if listener else None,  # the store closes it
    )


def _is_kept_by_torchrun(port: int) -> bool:
    """Whether there is a store already at this port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and str(port) == os.environ.get("MASTER_PORT")


def leave_world() -> None:
    """Ends the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_ranks() -> tuple[int, int]:
    """(index of this rank on its node, number of ranks on its node); a collective."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def select_device(kind: str, *, local_rank: int) -> torch.device:
    """The device of this rank, made the current one.

    Args:
        kind: "cpu", "cuda" or "auto" (CUDA where there is any).
        local_rank: index of the rank on its node. A process that sees one GPU only (as Ray arranges it) takes that one.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    assert kind in ("cuda", "auto"), f"no trainer runs on {kind}"
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def use_threads(num_threads: int | None, *, num_local_ranks: int) -> int:
    """Sets and returns torch's CPU threads of this rank; None shares the node's cores among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = num_threads or max(1, cores // num_local_ranks)
    torch.set_num_threads(num_threads)
    # With several threads some sums (the gradient of an indexing) are else added up in the order in which threads come.
    torch.use_deterministic_algorithms(True)
    # A check for bugs, which that switches on, at the price of a write of all new memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return num_threads


def data_mesh(device: torch.device) -> DeviceMesh:
    """All ranks in one data-parallel axis."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DATA_AXIS,))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(socket.getaddrinfo(address, None)[0][4][0]).is_loopback


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
