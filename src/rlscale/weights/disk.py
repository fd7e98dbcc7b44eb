"""The trainer's end of a weight channel over a folder that trainer and engines see.

trainer rank 0                                       every engine
  writes <folder>/v<version>                         goes on decoding
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   compares checksums, writes; holds the version
  resume                       ── HTTP ──────────>
  removes the folder before
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from rlscale.types import WeightVersion
from rlscale.weights.channel import Weights
from rlscale.weights.folder_channel import FolderChannel
from rlscale.weights.folders import write_folder


class DiskChannel(FolderChannel):
    """Sends weights as a full folder each time. See FolderChannel."""

    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        folder = self._folder / f"v{version:08d}"
        shutil.rmtree(folder, ignore_errors=True)  # the same version again, after a restart from a checkpoint
        checksums, num_files, num_bytes = write_folder(
            folder, weights, bucket_bytes=self._bucket_bytes, model_folder=self._model_folder
        )
        with self._paused(version):
            self._load(folder, version, checksums)
        for old in self._folder.iterdir():
            if old != folder:
                shutil.rmtree(old)
        return num_files, num_bytes

    def _load(self, folder: Path, version: WeightVersion, checksums: Mapping[str, str]) -> None:
        self._calls.on_all(lambda engine: engine.update_from_disk(folder, version=version, checksums=checksums))

    def _shut(self) -> None:
        """The newest folder stays: an engine may be started from it."""
