"""The trainer's end of a weight channel that writes what changed.

trainer rank 0                                       every engine
  writes a delta, now and then a full folder         goes on decoding
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   own: changes its weights by the deltas it lacks
                                                     SGLang: loads a full folder that was changed beside it
  resume                       ── HTTP ──────────>
"""

import shutil
import uuid
from collections.abc import Sequence

from rlscale.algo.checksum import Bytes, bytes_of
from rlscale.types import WeightVersion
from rlscale.weights.multi_sender import SendReport
from rlscale.weights.safetensors_folder import write_folder
from rlscale.weights.sync import Weights
from rlscale.weights.transports.delta import DeltaIndex, DeltaWriter, base_path, catch_up, delta_path
from rlscale.weights.transports.folder_channel import FolderChannel

LOAD_FORMAT = "delta"
MAX_DELTAS = 8
"""Then a full folder is written again: an engine that lost its weights has to read no more than this many."""


class DeltaChannel(FolderChannel):
    """Sends changes of weights, and now and then all of them. See FolderChannel.

    Rank 0 keeps a copy of the weights that were sent last, and is the only one that sends.
    """

    def _open(self) -> None:
        super()._open()
        # The folder is empty: the chain begins anew.
        self._sent: dict[str, Bytes] = {}
        self._index: DeltaIndex | None = None

    def _start(self, version: WeightVersion) -> None:
        """Engines go on while files are written."""

    def _send(self, weights: Weights, version: WeightVersion) -> SendReport:
        index = self._index
        if index is None or len(index.deltas) >= MAX_DELTAS or version <= index.newest:
            return self._write_base(weights, version)
        return self._write_delta(weights, version, index)

    def _finish(self, version: WeightVersion, shares: Sequence[SendReport]) -> None:
        (share,) = shares
        readers, others = self._engines_by_format(LOAD_FORMAT)
        full = self._folder / "full"
        whole = catch_up(self._folder, full) if others else {}
        with self._paused(version):
            calls = [
                self._calls.start(
                    engine.update_from_disk(
                        self._folder, version=version, checksums=share.checksums, load_format=LOAD_FORMAT
                    )
                )
                for engine in readers
            ]
            for engine in others:
                calls.append(self._calls.start(engine.update_from_disk(full, version=version, checksums=whole)))
            self._calls.settle(calls)
        self._prune()

    def _write_base(self, weights: Weights, version: WeightVersion) -> SendReport:
        def remembered() -> Weights:
            for name, tensor in weights:
                self._sent[name] = bytes_of(tensor.cpu()).copy()
                yield name, tensor

        path = base_path(self._folder, version)
        shutil.rmtree(path, ignore_errors=True)
        written = write_folder(path, remembered(), bucket_bytes=self._bucket_bytes, model_folder=self._model_folder)
        self._index = DeltaIndex(id=uuid.uuid4().hex, base=version, deltas=[])
        self._index.write(self._folder)
        return SendReport(num_buckets=written.num_files, num_bytes=written.num_bytes, checksums=written.checksums)

    def _write_delta(self, weights: Weights, version: WeightVersion, index: DeltaIndex) -> SendReport:
        writer = DeltaWriter(delta_path(self._folder, version), before=index.newest, after=version)
        for name, tensor in weights:
            writer.add(name, tensor, self._sent[name])
        checksums, num_bytes = writer.finish()
        self._index = DeltaIndex(id=index.id, base=index.base, deltas=[*index.deltas, version])
        self._index.write(self._folder)
        return SendReport(num_buckets=1, num_bytes=num_bytes, checksums=checksums)

    def _prune(self) -> None:
        index = self._index
        assert index is not None, "a push has written something"
        kept = {base_path(self._folder, index.base), *(delta_path(self._folder, version) for version in index.deltas)}
        for path in self._folder.iterdir():
            if path.name.startswith("base_") and path not in kept:
                shutil.rmtree(path)
            elif path.name.startswith("delta_") and path not in kept:
                path.unlink()

    def _shut(self) -> None:
        """The files stay: an engine may be started from the full folder."""
