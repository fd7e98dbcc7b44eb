"""The engine's end of a weight channel over process groups."""

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.types import WeightBucket, WeightGroup
from rlscale.weights.buckets import empty_flat, unpack
from rlscale.weights.checksum import checksum
from rlscale.weights.group import join_group, leave_group, start_broadcast


class ProcessGroupReceiver:
    """Receives buckets from rank 0 of the groups it joined and compares their checksums with those announced.

    Every call blocks for at most the timeout of the group. A group that failed cannot be used again.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, group: WeightGroup, rank: int) -> None:
        """Raises WeightSyncError when the name is taken or the group does not come about in time."""
        if group.name in self._groups:
            raise WeightSyncError(f"group_name must be unique, got {group.name!r} again")
        try:
            self._groups[group.name] = join_group(group, rank)
        except (RuntimeError, ValueError) as e:
            raise WeightSyncError(f"weight group {group.name!r} could not be joined: {e}") from e

    def receive(self, bucket: WeightBucket, group_name: str) -> dict[str, Tensor]:
        """The verified tensors of one bucket (rank 0 and all receivers of the group take part).

        Raises WeightSyncError naming the first tensor whose checksum differs, or the group when nothing came.
        """
        group = self._groups.get(group_name)
        if group is None:
            raise self._unknown(group_name)
        flat = empty_flat(bucket, self._device)
        try:
            start_broadcast(group, flat).wait()
        except RuntimeError as e:
            raise WeightSyncError(f"weight group {group_name!r} failed at {bucket.names[0]}: {e}") from e
        tensors = unpack(bucket, flat)
        for name, sent in zip(bucket.names, bucket.checksums, strict=bool(bucket.checksums)):
            got = checksum(tensors[name])
            if got != sent:
                raise WeightSyncError(f"{name} must arrive with checksum {sent}, got {got}; its bytes were changed")
        return tensors

    def leave(self, name: str) -> None:
        """Raises WeightSyncError when there is no such group."""
        group = self._groups.pop(name, None)
        if group is None:
            raise self._unknown(name)
        leave_group(group)

    def _unknown(self, name: str) -> WeightSyncError:
        return WeightSyncError(f"group_name must be a joined group, got {name!r}; joined: {list(self._groups)}")
