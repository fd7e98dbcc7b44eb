"""Files of changed weights: one file for the change between two versions, and the chain of them after a full folder.

    <root>/index.json             {"id": ..., "base": 3, "deltas": [4, 5], "num_senders": 1}
    <root>/base_00000003/         all weights of version 3, see safetensors_folder.py
    <root>/delta_00000004.rlsd    3 -> 4
    <root>/delta_00000005.rlsd    4 -> 5

Each of several senders writes its own tensors: `delta_00000004_00001.rlsd` is that of the second one.

For every block of 8 MiB of a tensor that changed, a file contains the exclusive or of old and new bytes, sorted by
their position within an element and compressed: unchanged bytes are zeros there and cost next to nothing, and the
changed bytes of the mantissa, which cannot be compressed, are together. Every tensor has the checksum of its new bytes.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import xxhash
import zstandard
from torch import Tensor

from rlscale.algo.checksum import Bytes, bytes_of, checksum, checksum_like
from rlscale.errors import WeightSyncError
from rlscale.types import WeightVersion
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import parse_dtype
from rlscale.weights.readers import checksum_error, open_target
from rlscale.weights.safetensors_folder import CHECKSUMS, WRITING, FolderWeights, map_file, write_json

MAGIC = b"RLSDELT1"
PIECE_BYTES = 8 * 2**20
LEVEL = 1  # higher levels take several times as long to save a few per cent: what is left is noise
# Magic, length of the header (8 bytes, little endian), digest of the header (8 bytes); then header and payload.
_FIXED_BYTES = len(MAGIC) + 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTensor:
    """One tensor of a delta. `pieces` are [block, offset in the payload, compressed bytes] of blocks that changed."""

    name: str
    dtype: str
    shape: list[int]
    checksum: str  # of the new bytes
    pieces: list[list[int]]

    @property
    def num_bytes(self) -> int:
        return parse_dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaIndex:
    """The full folder and the deltas after it in a root. A chain that restarts has a new `id`."""

    id: str
    base: WeightVersion
    deltas: list[WeightVersion]
    num_senders: int = 1  # files of each delta

    @property
    def newest(self) -> WeightVersion:
        return self.deltas[-1] if self.deltas else self.base

    def after(self, version: WeightVersion) -> list[WeightVersion]:
        """Returns the deltas that follow `version`."""
        return [delta for delta in self.deltas if delta > version]

    def paths(self, root: Path, version: WeightVersion) -> list[Path]:
        """Returns the files of one delta."""
        return [delta_path(root, version, sender=sender) for sender in range(self.num_senders)]

    def write(self, root: Path) -> None:
        write_json(root / "index.json", asdict(self))

    @classmethod
    def read(cls, root: Path) -> "DeltaIndex":
        """Raises ValueError when `root` contains no chain."""
        try:
            content = json.loads((root / "index.json").read_text(encoding="utf-8"))
            return cls(**{key: content[key] for key in ("id", "base", "deltas", "num_senders")})
        except (OSError, ValueError, KeyError) as e:
            raise ValueError(f"model_path must be a folder with a chain of deltas, got {str(root)!r} ({e})") from e


def base_path(root: Path, version: WeightVersion) -> Path:
    return root / f"base_{version:08d}"


def delta_path(root: Path, version: WeightVersion, *, sender: int = 0) -> Path:
    return root / (f"delta_{version:08d}_{sender:05d}.rlsd" if sender else f"delta_{version:08d}.rlsd")


class DeltaWriter:
    """Collects the changes of one update and writes them as a file that appears all at once."""

    def __init__(self, path: Path, *, before: WeightVersion, after: WeightVersion) -> None:
        self._path, self._before, self._after = path, before, after
        self._tensors: list[DeltaTensor] = []
        self._payload: list[bytes] = []
        self._num_bytes = 0
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)

    def add(self, name: str, tensor: Tensor, old: Bytes) -> None:
        """Adds the change of one tensor, and copies its new bytes into `old`."""
        new, pieces = bytes_of(tensor.cpu()), []
        for block, start in enumerate(range(0, new.size, PIECE_BYTES)):
            new_piece, old_piece = new[start : start + PIECE_BYTES], old[start : start + PIECE_BYTES]
            difference = np.bitwise_xor(new_piece, old_piece)
            if not difference.any():
                continue
            data = self._compressor.compress(_group_by_byte(difference, tensor.dtype.itemsize))
            pieces.append([block, self._num_bytes, len(data)])
            self._payload.append(data)
            self._num_bytes += len(data)
            old_piece[:] = new_piece
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._tensors.append(
            DeltaTensor(
                name=name, dtype=dtype, shape=list(tensor.shape), checksum=checksum(tensor.cpu()), pieces=pieces
            )
        )

    def finish(self) -> tuple[dict[str, str], int]:
        """Writes the file. Returns the checksum of every tensor and the size of the file in bytes."""
        content = {"before": self._before, "after": self._after, "tensors": [asdict(t) for t in self._tensors]}
        header = json.dumps(content).encode()
        temporary = self._path.with_name(self._path.name + WRITING)
        with temporary.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + xxhash.xxh3_64_digest(header) + header)
            file.writelines(self._payload)
        temporary.replace(self._path)
        return {t.name: t.checksum for t in self._tensors}, _FIXED_BYTES + len(header) + self._num_bytes


class DeltaReader:
    """One delta file.

    Raises WeightSyncError naming the file when it is missing or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
            size = int.from_bytes(bytes(self._data[8:16]), "little")
            header = bytes(self._data[_FIXED_BYTES : _FIXED_BYTES + size])
            if bytes(self._data[:8]) != MAGIC or xxhash.xxh3_64_digest(header) != bytes(self._data[16:24]):
                raise ValueError("its header is corrupt")
            content = json.loads(header)
        except (OSError, ValueError) as e:
            raise WeightSyncError(f"{path} must be a readable delta of the weights, got an error: {e}") from e
        self.payload_start = _FIXED_BYTES + size
        self.before, self.after = int(content["before"]), int(content["after"])
        self.tensors = [DeltaTensor(**tensor) for tensor in content["tensors"]]

    def apply(self, tensor: DeltaTensor, data: Bytes) -> None:
        """Changes the bytes of one tensor from the old to the new version.

        Raises WeightSyncError naming the tensor when a piece is corrupt; `data` may then be a mixture.
        """
        decompressor = zstandard.ZstdDecompressor()
        itemsize = parse_dtype(tensor.dtype).itemsize
        for block, offset, length in tensor.pieces:
            into = data[block * PIECE_BYTES : (block + 1) * PIECE_BYTES]
            packed = self._data[self.payload_start + offset : self.payload_start + offset + length]
            try:
                difference = decompressor.decompress(packed.data, max_output_size=into.size)
            except zstandard.ZstdError as e:
                raise WeightSyncError(f"{tensor.name} must arrive unchanged, but {self.path} is corrupt: {e}") from e
            if len(difference) != into.size:
                raise WeightSyncError(
                    f"{tensor.name} must have {into.size} bytes in block {block} of {self.path}, got {len(difference)}"
                )
            np.bitwise_xor(into, _group_by_element(difference, itemsize), out=into)


class DeltaWeights:
    """The newest weights of a root, for an engine that has an older version of them, or none.

    Args:
        root: of the chain.
        applied: the version whose exact bytes are in the targets; None: not known, the full folder is read first.
        announced: checksums that the trainer sent in addition to the files; they must be those in the files.
        on_written: called with the version when it is in the targets.

    Raises WeightSyncError when a link of the chain is missing or broken, ValueError when there is no chain.
    """

    def __init__(
        self,
        root: Path,
        *,
        applied: WeightVersion | None,
        announced: Mapping[str, str] = MappingProxyType({}),
        on_written: Callable[[WeightVersion], None] | None = None,
    ) -> None:
        self._index = DeltaIndex.read(root)
        self._on_written = on_written
        known = applied if applied in (self._index.base, *self._index.deltas) else None
        start = self._index.base if known is None else known
        self._base = FolderWeights(base_path(root, self._index.base), {}) if known is None else None
        self._deltas: list[DeltaReader] = []
        for version in self._index.after(start):
            newest = [DeltaReader(path) for path in self._index.paths(root, version)]
            # Each delta must start from the version that the delta before it ends with.
            before = self._deltas[-1].after if self._deltas else start
            for delta in newest:
                if delta.before != before:
                    raise WeightSyncError(f"{delta.path} must start from weight version {before}, got {delta.before}")
            self._deltas += newest
        self.layout = self._read_layout(root)
        for name, got in zip(self.layout.names, self.layout.checksums, strict=True):
            if announced and announced.get(name) != got:
                raise checksum_error(name, announced.get(name, "none"), got)

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights. Without targets there are no old bytes to change, so only the files are verified."""
        if self._base is not None:
            self._base.write(targets)
        by_name = dict(zip(self.layout.names, targets, strict=True)) if targets is not None else None
        for delta in self._deltas:
            for tensor in delta.tensors:
                if by_name is None:
                    delta.apply(tensor, np.zeros(tensor.num_bytes, dtype=np.uint8))
                elif tensor.pieces:
                    _apply_to_target(delta, tensor, by_name[tensor.name])
        # Only the bytes after the last delta have a checksum, so it is compared once, at the end.
        for name, sent in zip(self.layout.names, self.layout.checksums, strict=True):
            got = sent if by_name is None else checksum_like(by_name[name].cpu(), sent)
            if got != sent:
                raise checksum_error(name, sent, got)
        if self._on_written is not None:
            self._on_written(self._index.newest)
        return dict(zip(self.layout.names, self.layout.checksums, strict=True))

    def _read_layout(self, root: Path) -> WeightBucket:
        base = self._base or FolderWeights(base_path(root, self._index.base), {})
        if not self._index.deltas:
            return base.layout
        paths = self._index.paths(root, self._index.newest)
        newest = self._deltas[-len(paths) :] or [DeltaReader(path) for path in paths]
        last = {tensor.name: tensor for delta in newest for tensor in delta.tensors}
        if last.keys() != set(base.layout.names):
            raise WeightSyncError(
                f"{newest[0].path} must contain the same tensors as weight version {self._index.base}"
            )
        return replace(base.layout, checksums=[last[name].checksum for name in base.layout.names])


def update_mirror(root: Path, folder: Path) -> dict[str, str]:
    """Updates a full folder, for an engine that cannot read deltas, to the newest version; returns the checksums.

    A folder whose last update was interrupted, or of another chain, is copied from the base again.

    Raises WeightSyncError, ValueError as DeltaWeights does.
    """
    index, state = DeltaIndex.read(root), folder.with_name(folder.name + ".json")
    applied = _read_mirror_version(state, index)
    # The state file is absent while the files change, so that an interrupted update is noticed.
    state.unlink(missing_ok=True)
    if applied is None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base_path(root, index.base), folder)
        applied = index.base
    incoming = DeltaWeights(root, applied=applied)
    tensors = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in map_file(file).items()}
    checksums = incoming.write([tensors[name] for name in incoming.layout.names])
    write_json(folder / CHECKSUMS, checksums)
    write_json(state, {"id": index.id, "version": index.newest})
    return checksums


def _read_mirror_version(state: Path, index: DeltaIndex) -> WeightVersion | None:
    if not state.is_file():
        return None
    content = json.loads(state.read_text(encoding="utf-8"))
    known = content["id"] == index.id and content["version"] in (index.base, *index.deltas)
    return int(content["version"]) if known else None


def _apply_to_target(delta: DeltaReader, tensor: DeltaTensor, target: Tensor) -> None:
    if target.dtype != parse_dtype(tensor.dtype):
        raise WeightSyncError(
            f"{tensor.name} must have dtype {tensor.dtype} on the engine to apply a delta, got {target.dtype}; "
            "use train.weight_channel=disk"
        )
    buffer, finish = open_target(target, tensor.dtype, tensor.shape)
    if target.device.type != "cpu" or not target.is_contiguous():
        # The buffer is not the target's memory then: it gets the old bytes, is changed and copied back.
        buffer[:] = bytes_of(target.cpu())
    delta.apply(tensor, buffer)
    finish()


def _group_by_byte(data: Bytes, itemsize: int) -> bytes:
    """Returns the first bytes of all elements, then all second bytes, and so on. Blocks hold whole elements."""
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).tobytes()


def _group_by_element(data: bytes, itemsize: int) -> Bytes:
    """Returns the bytes in their original order: the inverse of `_group_by_byte`."""
    planes = np.frombuffer(data, dtype=np.uint8).reshape(itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1)
