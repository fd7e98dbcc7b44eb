"""The weights of a running engine: version, updates, and failed updates."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from rlscale.engines.embedded.named_weights import NamedWeights
from rlscale.engines.server.generate_request import BadRequest, Refused
from rlscale.errors import WeightSyncError
from rlscale.protocols import IncomingWeights, WeightReceiver
from rlscale.weight_types import WeightBucket, WeightGroup

Checksum = Callable[[Tensor], str]

UNUSABLE_STATUS = 503


class WeightStore:
    """Applies weight updates bucket by bucket.

    An update that fails after its first write leaves the engine unusable (`fault` is the reason) until a later update
    has written every tensor: the engine never answers with a mixture of versions. Released memory has no copy either;
    `missing` is then the reason.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        *,
        receiver: WeightReceiver | None,
        checksum: Checksum | None,
        version: str,
        is_unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._weights = NamedWeights(weights, aliases, is_unused=is_unused)
        self._receiver, self.checksum = receiver, checksum
        self.version = version
        self.updating = False
        self.num_writes = 0  # buckets; what was computed before the last one is of earlier weights
        self.fault: str | None = None
        self.missing: str | None = None
        self._written: set[str] = set()
        self._last_step_s = 0.0
        self._timeout_s = float("inf")

    def join(self, group: WeightGroup, rank: int) -> None:
        self._require_receiver().join(group, rank)
        self._timeout_s = group.timeout_s

    def leave(self, name: str) -> None:
        self._require_receiver().leave(name)

    @property
    def is_present(self) -> bool:
        return self.missing is None

    def release(self) -> None:
        """Frees the memory of all weights. Refused during an update."""
        if self.updating:
            raise Refused("release_memory_occupation must come after end_weight_update")
        self._weights.release()
        self.missing = "their memory is released; call resume_memory_occupation and send all of them"

    def allocate(self) -> None:
        """Allocates the memory of all weights again, with undefined contents."""
        self._weights.allocate()
        self.missing = "their memory was released; send all of them"

    def begin(self) -> None:
        self._require_memory()
        # A second begin without an end: the trainer of the first update is gone.
        if self.updating and self._written:
            self.fault = "a weight update began before the previous one had ended"
        self.updating = True
        self._written = set()
        self._last_step_s = time.monotonic()

    def receive(self, bucket: WeightBucket, group_name: str) -> None:
        """Receives one bucket from the group and writes it.

        Raises WeightSyncError with the tensor whose bytes differ from the sent ones.
        """
        if not self.updating:
            raise Refused("update_weights_from_distributed must come after begin_weight_update")
        targets = self._weights.targets(bucket)
        self._write(bucket, lambda: self._require_receiver().open_bucket(bucket, group_name).write(targets))

    def receive_tensors(self, payload: str, load_format: str) -> None:
        """Reads one bucket from memory that this process shares with the trainer, and writes it.

        Raises WeightSyncError with the tensor whose bytes differ from the sent ones.
        """
        if not self.updating:
            raise Refused("update_weights_from_tensor must come after begin_weight_update")
        incoming = _opened(lambda: self._require_receiver().open_tensors(payload, load_format))
        targets = self._weights.targets(incoming.layout)
        self._write(incoming.layout, lambda: incoming.write(targets))

    def load(self, folder: Path, *, load_format: str | None, version: str | None, checksums: Mapping[str, str]) -> None:
        """Writes all weights from a folder. An incomplete folder is refused before anything is written.

        Raises WeightSyncError with the tensor whose bytes differ from the sent ones.
        """
        if self.updating:
            raise Refused("update_weights_from_disk must come after end_weight_update")
        self._require_memory()
        version_number = int(version) if version is not None and version.isdecimal() else None
        incoming = _opened(
            lambda: self._require_receiver().open_folder(
                folder, load_format=load_format, version=version_number, checksums=checksums
            )
        )
        targets = self._weights.targets(incoming.layout)
        missing = self._weights.missing(self._weights.own_names(incoming.layout.names))
        if missing:
            raise BadRequest("model_path", "contain all weights of the model", f"a folder without {missing[0]}")
        self._write(incoming.layout, lambda: incoming.write(targets))
        self.fault = self.missing = None

    def end(self) -> None:
        if not self.updating:
            raise Refused("end_weight_update must come after begin_weight_update")
        self.updating = False
        # An update without any bucket changes nothing; one with some of the tensors would mix versions.
        missing = self._weights.missing(self._written)
        if not missing:
            self.fault = self.missing = None
        elif self._written:
            self.fault = f"a weight update lacked {missing[0]} and {len(missing) - 1} more"
            raise WeightSyncError(f"all weights must be sent between begin and end, {missing[0]} was not")
        self.require_usable()

    def expire(self) -> None:
        """Marks an update as failed if its trainer was silent for the timeout of its group."""
        if self.updating and time.monotonic() - self._last_step_s > self._timeout_s:
            self.updating = False
            self.fault = f"a weight update was not ended within {self._timeout_s:g} s"

    def set_version(self, version: str) -> None:
        self.require_usable()
        self.version = version

    def require_usable(self) -> None:
        self.require_present()
        self.require_sound()

    def require_present(self) -> None:
        if self.missing is not None:
            raise Refused(f"weights are unusable: {self.missing}", status=UNUSABLE_STATUS)

    def require_sound(self) -> None:
        if self.fault is not None:
            raise Refused(f"weights are unusable: {self.fault}; send all of them again", status=UNUSABLE_STATUS)

    def checksums(self) -> dict[str, str]:
        if self.checksum is None:
            raise Refused("this server was started without a checksum function")
        self.require_present()
        return {name: self.checksum(tensor) for name, tensor in self._weights.items()}

    def _write(self, layout: WeightBucket, write: Callable[[], object]) -> None:
        self.num_writes += 1
        try:
            write()
        except BaseException as e:
            self.fault = f"a weight update failed: {e}"
            self.updating = False
            raise
        # Tied tensors arrive under either name and are written once.
        self._written |= self._weights.own_names(layout.names)
        self._last_step_s = time.monotonic()

    def _require_memory(self) -> None:
        if self._weights.is_released:
            raise Refused(f"weights cannot be updated: {self.missing}")

    def _require_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise Refused("this server was started without a weight receiver")
        return self._receiver


def _opened(open_weights: Callable[[], IncomingWeights]) -> IncomingWeights:
    try:
        return open_weights()
    except ValueError as e:
        raise Refused(str(e)) from e
