"""Weights through a folder that trainer and engines see, in full each time.

trainer rank 0                                       every engine
  writes <folder>/v<version>                         decodes
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   compares checksums, writes; holds the version
  resume                       ── HTTP ──────────>   decodes
  removes the previous folder

Each of several senders writes its own files; rank 0 writes the index.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlscale.types import WeightVersion
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.safetensors_folder import (
    TensorFiles,
    finish_folder,
    recreate_folder,
    start_folder,
    write_files,
)
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.transport import EngineCall, SendReport, Transport, Weights


class DiskTransport(Transport):
    """Writes a full folder of safetensors files for each version, which the engines load.

    Args:
        folder: used by this transport alone; its content is removed.
        group: this rank among the senders.
        bucket_bytes: max bytes of one file (a larger tensor has its own file).
        model_folder: a Hugging Face folder whose configuration and tokenizer are copied next to the weights.
        precision: of the weights as they arrive here; None: unquantised.
    """

    streams = False

    def __init__(
        self,
        folder: Path,
        *,
        group: SenderGroup,
        bucket_bytes: int,
        model_folder: Path | None = None,
        precision: str | None = None,
    ) -> None:
        self._folder, self._group = folder, group
        self._bucket_bytes, self._model_folder = bucket_bytes, model_folder
        self._precision = precision
        self._newest: Path | None = None

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        if self._group.rank == 0:
            # An earlier trainer may have left files here, and the weights of new engines are unknown.
            recreate_folder(self._folder)

    def prepare(self, version: WeightVersion) -> None:
        """See Transport."""
        # After a restart from a checkpoint the same version is written again.
        shutil.rmtree(self._version_folder(version), ignore_errors=True)
        start_folder(self._version_folder(version))

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        stem = "model" if self._group.is_single else f"model-{self._group.rank:05d}"
        written = write_files(self._version_folder(version), weights, bucket_bytes=self._bucket_bytes, stem=stem)
        return SendReport(
            num_buckets=written.num_files,
            num_bytes=written.num_bytes,
            checksums=written.checksums,
            files=written.files,
        )

    def publish(self, version: WeightVersion, reports: Sequence[SendReport]) -> EngineCall:
        """See Transport."""
        folder, written = self._version_folder(version), TensorFiles()
        for report in reports:
            written.add(checksums=report.checksums, files=report.files, num_bytes=report.num_bytes)
        finish_folder(folder, written, model_folder=self._model_folder, precision=self._precision)
        self._newest = folder
        return lambda engine: engine.update_from_disk(folder, version=version, checksums=written.checksums)

    def prune(self) -> None:
        """See Transport."""
        for path in self._folder.iterdir():
            if path != self._newest:
                shutil.rmtree(path)

    def close(self) -> None:
        """Keeps the newest folder: an engine may be started from it."""

    def _version_folder(self, version: WeightVersion) -> Path:
        return self._folder / f"v{version:08d}"
