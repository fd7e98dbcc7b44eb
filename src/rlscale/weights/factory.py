"""Builds the weight sync that the config selects."""

from collections.abc import Callable, Sequence
from typing import Any

from rlscale.config import WeightChannelName
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.weights.engine_groups import GroupOptions
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.shared_base import SharedBase
from rlscale.weights.sync import MakeEngine, WeightSync
from rlscale.weights.transport import Transport
from rlscale.weights.transports.cuda_ipc import CudaIpcTransport
from rlscale.weights.transports.delta import DeltaTransport
from rlscale.weights.transports.disk import DiskTransport
from rlscale.weights.transports.gloo import GlooTransport
from rlscale.weights.transports.nccl import NcclTransport
from rlscale.weights.transports.shm_ring import ShmRingTransport

__all__ = ["ChannelSpec", "make_channel", "make_shared_base"]


def make_channel(
    spec: ChannelSpec,
    *,
    make_engine: MakeEngine,
    rank: int,
    master_address: str = "127.0.0.1",
    senders: Sequence[int] = (0,),
) -> WeightSync:
    """Builds the weight sync of one trainer rank.

    Args:
        master_address: an address of this rank's machine that the engines can reach.
        senders: the ranks that send. The transports through memory send from rank 0 alone.
    """
    if spec.name == WeightChannelName.shared_memory:
        senders = (0,)
    group = SenderGroup(rank=rank, senders=senders)

    def process_group() -> Transport:
        options = GroupOptions(bucket_bytes=spec.bucket_bytes, timeout_s=spec.timeout_s, master_address=master_address)
        if spec.backend == "nccl":
            return NcclTransport(options, in_one_group=group.is_single)
        return GlooTransport(options)

    def shared_memory() -> Transport:
        if spec.device == "cuda":
            return CudaIpcTransport(bucket_bytes=spec.bucket_bytes)
        return ShmRingTransport(bucket_bytes=spec.bucket_bytes, timeout_s=spec.timeout_s)

    folder_options: dict[str, Any] = {
        "bucket_bytes": spec.bucket_bytes,
        "model_folder": spec.model_folder,
        "precision": spec.precision,
    }

    def disk() -> Transport:
        return DiskTransport(spec.folder, group=group, **folder_options)

    def delta() -> Transport:
        return DeltaTransport(spec.folder, group=group, **folder_options)

    makers: dict[WeightChannelName, Callable[[], Transport]] = {
        WeightChannelName.process_group: process_group,
        WeightChannelName.shared_memory: shared_memory,
        WeightChannelName.disk: disk,
        WeightChannelName.delta: delta,
    }
    return WeightSync(
        makers[spec.name](),
        make_engine=make_engine,
        group=group,
        timeout_s=spec.timeout_s,
        pause_mode=spec.pause_mode,
        precision=spec.precision,
    )


def make_shared_base(spec: ChannelSpec, *, make_engine: MakeEngine, rank: int, senders: Sequence[int]) -> SharedBase:
    """Builds what one trainer rank does with engines that other jobs use, too. Arguments as of `make_channel`."""
    group = SenderGroup(rank=rank, senders=senders)
    return SharedBase(make_engine=make_engine, group=group, timeout_s=spec.timeout_s, precision=spec.precision)
