"""The trainer's end of a weight channel over a folder that trainer and engines see.

trainer rank 0                                       every engine
  writes <folder>/v<version>                         goes on decoding
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   compares checksums, writes; holds the version
  resume                       ── HTTP ──────────>
  removes the folder before

Of several trainer ranks that send (see shares) each writes files of its own; rank 0 writes the index.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlscale.types import WeightVersion
from rlscale.weights.multi_sender import SendReport
from rlscale.weights.safetensors_folder import Written, finish_folder, start_folder, write_files
from rlscale.weights.sync import Weights
from rlscale.weights.transports.folder_channel import FolderChannel


class DiskChannel(FolderChannel):
    """Sends weights as a full folder each time. See FolderChannel."""

    def _start(self, version: WeightVersion) -> None:
        shutil.rmtree(self._place(version), ignore_errors=True)  # the same again, after a restart from a checkpoint
        start_folder(self._place(version))

    def _send(self, weights: Weights, version: WeightVersion) -> SendReport:
        stem = "model" if self._team.is_one else f"model-{self._rank:05d}"
        written = write_files(self._place(version), weights, bucket_bytes=self._bucket_bytes, stem=stem)
        return SendReport(
            num_buckets=written.num_files,
            num_bytes=written.num_bytes,
            checksums=written.checksums,
            files=written.files,
        )

    def _finish(self, version: WeightVersion, shares: Sequence[SendReport]) -> None:
        folder, whole = self._place(version), Written()
        for share in shares:
            whole.add(checksums=share.checksums, files=share.files, num_bytes=share.num_bytes)
        finish_folder(folder, whole, model_folder=self._model_folder)
        with self._paused(version):
            self._load(folder, version, whole.checksums)
        for old in self._folder.iterdir():
            if old != folder:
                shutil.rmtree(old)

    def _place(self, version: WeightVersion) -> Path:
        return self._folder / f"v{version:08d}"

    def _load(self, folder: Path, version: WeightVersion, checksums: Mapping[str, str]) -> None:
        self._calls.on_all(lambda engine: engine.update_from_disk(folder, version=version, checksums=checksums))

    def _shut(self) -> None:
        """The newest folder stays: an engine may be started from it."""
