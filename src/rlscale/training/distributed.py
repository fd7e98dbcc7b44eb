"""Process groups of the trainer ranks, and device and CPU threads of a rank."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlscale.hosts import is_loopback
from rlscale.training.listener import listen
from rlscale.training.packing.context_parallel import ContextGroup

DATA_AXIS, CONTEXT_AXIS = "data", "context"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGrid:
    """Grid of the ranks: the ranks of a row share their samples (context parallelism), those of a column do not.

    Parameters and gradients are sharded over all ranks (`make_data_mesh`).
    """

    data_index: int  # row of this rank: index of its share of the samples
    data_group: dist.ProcessGroup | None = None  # its column; None: all ranks
    context: ContextGroup | None = None  # its row; None: a row has one rank

    @classmethod
    def from_context_size(cls, device: torch.device, *, context_size: int) -> RankGrid:
        """Makes the groups; a collective of all ranks. Consecutive ranks, which share a node, form a row."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if context_size == 1:
            return cls(data_index=rank)
        assert world_size % context_size == 0, f"a config rule ensures that {context_size} divides {world_size} ranks"
        shape = (world_size // context_size, context_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS))
        data_index, index = divmod(rank, context_size)
        context = ContextGroup(index=index, size=context_size, group=mesh.get_group(CONTEXT_AXIS))
        return cls(data_index=data_index, data_group=mesh.get_group(DATA_AXIS), context=context)


def join_world(
    rank: int, world_size: int, master_address: str, master_port: int | socket.socket, backend: str, timeout_s: float
) -> None:
    """Makes the default process group; a collective that returns when all ranks have joined.

    Args:
        rank: of this process; rank 0 listens.
        world_size: number of ranks.
        master_address: host name or address of rank 0; it listens there and on no other interface.
        master_port: free port of that host; 0 selects one, for a world of one rank. On rank 0 also a socket that
            listens there already; the world owns it afterwards. Under torchrun the value of `MASTER_PORT`, where
            torchrun itself listens.
        backend: "gloo", or "nccl" (with gloo for tensors on the CPU).
        timeout_s: limit of the wait for other ranks, now and in every collective.
    """
    assert world_size > 0 and 0 <= rank < world_size, f"rank {rank} is not in a world of {world_size}"
    assert master_port != 0 or world_size == 1, "several ranks need a known port"
    timeout = timedelta(seconds=timeout_s)
    if is_loopback(str(socket.getaddrinfo(master_address, None)[0][4][0])):
        # By default gloo listens on the interface that the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if backend == "gloo":
        # Records of the last 2,000 collectives: NCCL writes them when one does not end, gloo never does.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    store: Store
    if isinstance(master_port, int) and _is_torchrun_store(master_port):
        # torchrun keeps its store through restarts: a prefix per attempt separates their keys.
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
    """Store of a world, which rank 0 serves."""
    listener = None
    if rank == 0:
        listener = listen(master_address, port=master_port) if isinstance(master_port, int) else master_port
        master_port = int(listener.getsockname()[1])
    assert isinstance(master_port, int), "rank 0 listens"
    return TCPStore(
        master_address,
        master_port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listener.detach() if listener else None,  # the store closes it
    )


def _is_torchrun_store(port: int) -> bool:
    """True where torchrun already serves a store at this port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and str(port) == os.environ.get("MASTER_PORT")


def leave_world() -> None:
    """Ends the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def find_local_ranks() -> tuple[int, int]:
    """(index of this rank on its node, number of ranks on its node); a collective of all ranks."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def select_device(kind: str, *, local_rank: int) -> torch.device:
    """Device of this rank, which becomes the current one.

    Args:
        kind: "cpu", "cuda" or "auto" (CUDA where available).
        local_rank: index of the rank on its node. A process that sees one GPU, as under Ray, uses that one.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    assert kind in ("cuda", "auto"), f"no trainer runs on {kind}"
    # A process that sees one GPU, as under Ray, gets index 0 for every local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_num_threads(num_threads: int | None, *, num_local_ranks: int) -> int:
    """Sets and returns the number of torch's CPU threads; None divides the cores of the node by its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = num_threads or max(1, cores // num_local_ranks)
    torch.set_num_threads(num_threads)
    # With several threads some sums, e.g. the gradient of an indexing, otherwise depend on the order of the threads.
    torch.use_deterministic_algorithms(True)
    # The setting above also fills new memory with NaN, a check for bugs that costs a write of all of it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return num_threads


def make_data_mesh(device: torch.device) -> DeviceMesh:
    """Mesh of all ranks in one data-parallel axis; a collective of all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DATA_AXIS,))


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
