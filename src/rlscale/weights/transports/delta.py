"""Weights through a folder that trainer and engines see, of which only changes are written.

trainer rank 0                                       every engine
  writes a delta, now and then a full folder         decodes
  pause, flush                 ── HTTP ──────────>   stops decoding
  load                         ── HTTP ──────────>   rlscale: applies the deltas that it lacks
                                                     SGLang: loads a full folder that was updated by the delta
  resume                       ── HTTP ──────────>   decodes

Each of several senders writes its own files; rank 0 writes the index.
"""

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlscale.algo.checksum import Bytes, bytes_of
from rlscale.protocols import Engine
from rlscale.types import WeightVersion
from rlscale.weights.delta_files import DeltaIndex, DeltaWriter, base_path, delta_path, update_mirror
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.safetensors_folder import TensorFiles, finish_folder, recreate_folder, start_folder, write_files
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.transport import EngineCall, SendReport, Transport, Weights

LOAD_FORMAT = "delta"
MAX_DELTAS = 8
"""Deltas after a full folder. An engine that lost its weights never has to read more."""


class DeltaTransport(Transport):
    """Writes the change of the weights as a delta, and every few versions a full folder.

    Every sender keeps a copy of the weights that it sent last.

    Args:
        folder: used by this transport alone; its content is removed.
        group: this rank among the senders. A weight must come from the same sender each time.
        bucket_bytes: max bytes of one file of a full folder.
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
        self._rpc: EngineRpc | None = None
        self._sent: dict[str, Bytes] = {}
        self._index: DeltaIndex | None = None  # after the version that is sent now; the same on all senders but the id

    def open(self, rpc: EngineRpc) -> None:
        """See Transport. The chain restarts: an earlier trainer may have left files, and the weights of new engines are
        unknown."""
        if self._group.rank == 0:
            recreate_folder(self._folder)
        self._rpc, self._sent, self._index = rpc, {}, None

    def prepare(self, version: WeightVersion) -> None:
        """See Transport."""
        index = self._index = self._next_index(version)
        if not index.deltas:
            path = base_path(self._folder, version)
            shutil.rmtree(path, ignore_errors=True)
            start_folder(path)

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        if self._group.rank != 0:  # on rank 0 `prepare` has done it
            self._index = self._next_index(version)
        index = self._index
        assert index is not None and index.newest == version, "prepare comes before send"
        if not index.deltas:
            return self._write_base(weights, version)
        before = [index.base, *index.deltas][-2]
        return self._write_delta(weights, before=before, after=version)

    def publish(self, version: WeightVersion, reports: Sequence[SendReport]) -> EngineCall:
        """See Transport."""
        assert self._rpc is not None and self._index is not None, "open and prepare come before publish"
        written = TensorFiles()
        for report in reports:
            written.add(checksums=report.checksums, files=report.files, num_bytes=report.num_bytes)
        if not self._index.deltas:
            finish_folder(
                base_path(self._folder, version), written, model_folder=self._model_folder, precision=self._precision
            )
        # The index last: an engine that reads it finds every file that it names.
        self._index.write(self._folder)
        _, others = self._rpc.split_by_format(LOAD_FORMAT)
        mirror = self._folder / "full"
        mirror_checksums = update_mirror(self._folder, mirror) if others else {}

        async def load(engine: Engine) -> None:
            if engine in others:
                await engine.update_from_disk(mirror, version=version, checksums=mirror_checksums)
            else:
                await engine.update_from_disk(
                    self._folder, version=version, checksums=written.checksums, load_format=LOAD_FORMAT
                )

        return load

    def prune(self) -> None:
        """See Transport."""
        index = self._index
        assert index is not None, "a push has written an index"
        deltas = (path for version in index.deltas for path in index.paths(self._folder, version))
        kept = {base_path(self._folder, index.base), *deltas}
        for path in self._folder.iterdir():
            if path.name.startswith("base_") and path not in kept:
                shutil.rmtree(path)
            elif path.name.startswith("delta_") and path not in kept:
                path.unlink()

    def close(self) -> None:
        """Keeps the files: an engine may be started from the full folder."""

    def _next_index(self, version: WeightVersion) -> DeltaIndex:
        """The index with this version: as a delta, or as a full folder that starts another chain."""
        index = self._index
        # A version that is not newer comes after a restart from a checkpoint: no delta leads back to it.
        if index is None or len(index.deltas) >= MAX_DELTAS or version <= index.newest:
            return DeltaIndex(id=uuid.uuid4().hex, base=version, deltas=[], num_senders=len(self._group.senders))
        return replace(index, deltas=[*index.deltas, version])

    def _write_base(self, weights: Weights, version: WeightVersion) -> SendReport:
        def remember_sent() -> Weights:
            for name, tensor in weights:
                self._sent[name] = bytes_of(tensor.cpu()).copy()
                yield name, tensor

        stem = "model" if self._group.is_single else f"model-{self._group.rank:05d}"
        path = base_path(self._folder, version)
        written = write_files(path, remember_sent(), bucket_bytes=self._bucket_bytes, stem=stem)
        return SendReport(
            num_buckets=written.num_files,
            num_bytes=written.num_bytes,
            checksums=written.checksums,
            files=written.files,
        )

    def _write_delta(self, weights: Weights, *, before: WeightVersion, after: WeightVersion) -> SendReport:
        sender = self._group.senders.index(self._group.rank)
        writer = DeltaWriter(delta_path(self._folder, after, sender=sender), before=before, after=after)
        for name, tensor in weights:
            writer.add(name, tensor, self._sent[name])
        checksums, num_bytes = writer.finish()
        return SendReport(num_buckets=1, num_bytes=num_bytes, checksums=checksums)
