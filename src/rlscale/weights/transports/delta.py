"""Weights through a folder that trainer and engines see, of which only changes are written.

trainer rank 0                                       every engine
  writes a delta, now and then a full folder         decodes
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   rlscale: applies the deltas that it lacks
                                                     SGLang: loads a full folder that was updated by the delta
  resume                       ── HTTP ──────────>   decodes
"""

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlscale.algo.checksum import Bytes, bytes_of
from rlscale.protocols import Engine
from rlscale.types import WeightVersion
from rlscale.weights.delta_files import DeltaIndex, DeltaWriter, base_path, delta_path, update_mirror
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.safetensors_folder import recreate_folder, write_folder
from rlscale.weights.transport import EngineCall, SendReport, Transport, Weights

LOAD_FORMAT = "delta"
MAX_DELTAS = 8
"""Deltas after a full folder. An engine that lost its weights never has to read more."""


class DeltaTransport(Transport):
    """Writes the change of the weights as a delta, and every few versions a full folder.

    Rank 0 is the only sender. It keeps a copy of the weights that were sent last.

    Args:
        folder: used by this transport alone; its content is removed.
        bucket_bytes: max bytes of one file of a full folder.
        model_folder: a Hugging Face folder whose configuration and tokenizer are copied next to the weights.
    """

    streams = False

    def __init__(self, folder: Path, *, bucket_bytes: int, model_folder: Path | None = None) -> None:
        self._folder, self._bucket_bytes, self._model_folder = folder, bucket_bytes, model_folder
        self._rpc: EngineRpc | None = None
        self._sent: dict[str, Bytes] = {}
        self._index: DeltaIndex | None = None

    def open(self, rpc: EngineRpc) -> None:
        """See Transport. The chain restarts: an earlier trainer may have left files, and the weights of new engines are
        unknown."""
        recreate_folder(self._folder)
        self._rpc, self._sent, self._index = rpc, {}, None

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        index = self._index
        # A version that is not newer comes after a restart from a checkpoint: no delta leads back to it.
        if index is None or len(index.deltas) >= MAX_DELTAS or version <= index.newest:
            return self._write_base(weights, version)
        return self._write_delta(weights, version, index)

    def publish(self, version: WeightVersion, reports: Sequence[SendReport]) -> EngineCall:
        """See Transport."""
        assert self._rpc is not None, "open comes before publish"
        (report,) = reports
        _, others = self._rpc.split_by_format(LOAD_FORMAT)
        mirror = self._folder / "full"
        mirror_checksums = update_mirror(self._folder, mirror) if others else {}

        async def load(engine: Engine) -> None:
            if engine in others:
                await engine.update_from_disk(mirror, version=version, checksums=mirror_checksums)
            else:
                await engine.update_from_disk(
                    self._folder, version=version, checksums=report.checksums, load_format=LOAD_FORMAT
                )

        return load

    def prune(self) -> None:
        """See Transport."""
        index = self._index
        assert index is not None, "a push has written an index"
        kept = {base_path(self._folder, index.base), *(delta_path(self._folder, version) for version in index.deltas)}
        for path in self._folder.iterdir():
            if path.name.startswith("base_") and path not in kept:
                shutil.rmtree(path)
            elif path.name.startswith("delta_") and path not in kept:
                path.unlink()

    def close(self) -> None:
        """Keeps the files: an engine may be started from the full folder."""

    def _write_base(self, weights: Weights, version: WeightVersion) -> SendReport:
        def remember_sent() -> Weights:
            for name, tensor in weights:
                self._sent[name] = bytes_of(tensor.cpu()).copy()
                yield name, tensor

        path = base_path(self._folder, version)
        shutil.rmtree(path, ignore_errors=True)
        written = write_folder(path, remember_sent(), bucket_bytes=self._bucket_bytes, model_folder=self._model_folder)
        self._index = DeltaIndex(id=uuid.uuid4().hex, base=version, deltas=[])
        self._index.write(self._folder)
        return SendReport(num_buckets=written.num_files, num_bytes=written.num_bytes, checksums=written.checksums)

    def _write_delta(self, weights: Weights, version: WeightVersion, index: DeltaIndex) -> SendReport:
        writer = DeltaWriter(delta_path(self._folder, version), before=index.newest, after=version)
        for name, tensor in weights:
            writer.add(name, tensor, self._sent[name])
        checksums, num_bytes = writer.finish()
        # The index last: an engine that reads it finds every delta that it names.
        self._index = DeltaIndex(id=index.id, base=index.base, deltas=[*index.deltas, version])
        self._index.write(self._folder)
        return SendReport(num_buckets=1, num_bytes=num_bytes, checksums=checksums)
