"""The engine's ends of all weight transports."""

from collections.abc import Mapping
from pathlib import Path

import torch

from rlscale.errors import WeightSyncError
from rlscale.protocols import IncomingWeights
from rlscale.types import WeightVersion
from rlscale.weight_types import WeightBucket, WeightGroup
from rlscale.weights.buckets import Staging, allocate_flat, tensor_sizes
from rlscale.weights.delta_files import DeltaIndex, DeltaWeights
from rlscale.weights.readers import BroadcastWeights, decode_payload
from rlscale.weights.ring_buffer import RingReader
from rlscale.weights.safetensors_folder import FolderWeights
from rlscale.weights.torch_groups import Group, join_group, leave_group, start_broadcast
from rlscale.weights.transports.cuda_ipc import CudaIpcWeights
from rlscale.weights.transports.gloo_blocks import LOAD_FORMAT as BLOCKS
from rlscale.weights.transports.gloo_blocks import BlockWeights
from rlscale.weights.transports.shm_ring import RingWeights

DEFAULT_TIMEOUT_S = 300.0


class ProcessGroupReceiver:
    """Receives buckets from rank 0 of the groups it joined, for checksums to be compared with those announced.

    Every call blocks for at most the timeout of the group. A group that failed cannot be used again.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._groups: dict[str, Group] = {}
        self._staging = Staging()

    def join(self, group: WeightGroup, rank: int) -> None:
        """Raises WeightSyncError when the name is taken or the other members do not join in time."""
        if group.name in self._groups:
            raise WeightSyncError(f"group_name must be unique, got {group.name!r} again")
        try:
            self._groups[group.name] = join_group(group, rank)
        except (RuntimeError, ValueError) as e:
            raise WeightSyncError(f"weight group {group.name!r} could not be joined: {e}") from e

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        """Joins the broadcast of one bucket (a collective of rank 0 and all receivers of the group).

        The previous bucket must have been written. Raises WeightSyncError for a group that was not joined.
        """
        group = self._groups.get(group_name)
        if group is None:
            raise self._unknown(group_name)
        if bucket.load_format == BLOCKS:
            return BlockWeights(bucket, group, group_name=group_name)
        # One buffer on the CPU is enough: the previous bucket was written, so its bytes are no longer needed.
        on_cpu = self._device.type == "cpu"
        flat = self._staging.reserve(sum(tensor_sizes(bucket))) if on_cpu else allocate_flat(bucket, self._device)
        try:
            work = start_broadcast(group, flat)
        except RuntimeError as e:
            raise WeightSyncError(f"weight group {group_name!r} failed at {bucket.names[0]}: {e}") from e
        return BroadcastWeights(bucket, flat, work, group_name=group_name)

    def leave(self, name: str) -> None:
        """Raises WeightSyncError when there is no such group."""
        group = self._groups.pop(name, None)
        if group is None:
            raise self._unknown(name)
        leave_group(group)

    def _unknown(self, name: str) -> WeightSyncError:
        return WeightSyncError(f"group_name must be a joined group, got {name!r}; joined: {list(self._groups)}")


class EngineReceiver(ProcessGroupReceiver):
    """A `WeightReceiver` for every transport. Not thread-safe, like the engine's weights themselves."""

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._ring: tuple[str, RingReader] | None = None
        # The chain of deltas and the version whose exact bytes are in the targets. Any other update clears it.
        self._applied: tuple[str, WeightVersion] | None = None

    @property
    def formats(self) -> list[str]:
        """The formats of weights that this receiver reads in addition to SGLang's."""
        return ["shared_memory", "delta", "cuda_ipc" if self._device.type == "cuda" else BLOCKS]

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        """See ProcessGroupReceiver."""
        self._applied = None
        return super().open_bucket(bucket, group_name)

    def open_tensors(self, payload: str, load_format: str) -> IncomingWeights:
        """See WeightReceiver."""
        self._applied = None
        content, layout = decode_payload(payload)
        if load_format == "cuda_ipc":
            return CudaIpcWeights(content.get("ipc", {}), layout, device=self._device)
        name = content.get("ring")
        if not isinstance(name, str):
            raise ValueError(f"a payload must contain the name of its shared-memory ring, got {name!r}")
        return RingWeights(self._open_ring(name, float(content.get("timeout_s", DEFAULT_TIMEOUT_S))), layout)

    def open_folder(
        self, folder: Path, *, load_format: str | None, version: WeightVersion | None, checksums: Mapping[str, str]
    ) -> IncomingWeights:
        """See WeightReceiver."""
        previous, self._applied = self._applied, None
        if load_format != "delta":
            return FolderWeights(folder, checksums)
        index = DeltaIndex.read(folder)
        if version is not None and version != index.newest:
            raise WeightSyncError(f"the deltas in {folder} must end at weight version {version}, got {index.newest}")
        applied = previous[1] if previous is not None and previous[0] == index.id else None

        def remember(newest: WeightVersion) -> None:
            self._applied = (index.id, newest)

        return DeltaWeights(folder, applied=applied, announced=checksums, on_written=remember)

    def _open_ring(self, name: str, timeout_s: float) -> RingReader:
        if self._ring is None or self._ring[0] != name or self._ring[1].is_broken:
            if self._ring is not None:
                self._ring[1].close()
            self._ring = None
            self._ring = (name, RingReader(name, timeout_s=timeout_s))
        return self._ring[1]
