"""The weight channel that a run chose."""

from collections.abc import Callable, Sequence

from rlscale.config import WeightChannelName
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import EngineChannel, MakeEngine
from rlscale.weights.transports.cuda_ipc import CudaIpcChannel
from rlscale.weights.transports.delta_channel import DeltaChannel
from rlscale.weights.transports.disk import DiskChannel
from rlscale.weights.transports.gloo_packed import ProcessGroupChannel
from rlscale.weights.transports.shared_memory import SharedMemoryChannel

__all__ = ["ChannelSpec", "make_channel"]


def make_channel(
    spec: ChannelSpec,
    *,
    make_engine: MakeEngine,
    rank: int,
    master_address: str = "127.0.0.1",
    senders: Sequence[int] = (0,),
) -> EngineChannel:
    """The channel of one trainer rank, of which `senders` send. See EngineChannel for the other arguments."""
    team = SenderGroup(rank=rank, senders=senders)

    def process_group() -> EngineChannel:
        return ProcessGroupChannel(
            make_engine=make_engine,
            team=team,
            bucket_bytes=spec.bucket_bytes,
            backend=spec.backend,
            timeout_s=spec.timeout_s,
            master_address=master_address,
        )

    def shared_memory() -> EngineChannel:
        kind = CudaIpcChannel if spec.device == "cuda" else SharedMemoryChannel
        return kind(make_engine=make_engine, rank=rank, bucket_bytes=spec.bucket_bytes, timeout_s=spec.timeout_s)

    def in_a_folder(kind: type[DiskChannel] | type[DeltaChannel]) -> EngineChannel:
        return kind(
            make_engine=make_engine,
            team=team,
            folder=spec.folder,
            bucket_bytes=spec.bucket_bytes,
            timeout_s=spec.timeout_s,
            model_folder=spec.model_folder,
        )

    makers: dict[WeightChannelName, Callable[[], EngineChannel]] = {
        WeightChannelName.process_group: process_group,
        WeightChannelName.shared_memory: shared_memory,
        WeightChannelName.disk: lambda: in_a_folder(DiskChannel),
        WeightChannelName.delta: lambda: in_a_folder(DeltaChannel),
    }
    channel = makers[spec.name]()
    channel.pause_mode = spec.pause_mode
    return channel
