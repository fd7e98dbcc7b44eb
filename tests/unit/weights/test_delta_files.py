"""Deltas: their content, an engine that applies them, and the errors for a missing or broken link."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.checksum import Bytes, bytes_of, checksum
from rlscale.errors import WeightSyncError
from rlscale.weights.delta_files import (
    PIECE_BYTES,
    DeltaIndex,
    DeltaReader,
    DeltaWeights,
    DeltaWriter,
    base_path,
    delta_path,
    update_mirror,
)
from rlscale.weights.receiver import EngineReceiver
from rlscale.weights.safetensors_folder import map_file
from tests.tiny_weights import write_folder

Weights = dict[str, Tensor]


def weights_at(version: int) -> Weights:
    """All of `a` changes from version to version, one element of `b`, and nothing of `c`."""
    generator = torch.Generator().manual_seed(version)
    fixed = torch.Generator().manual_seed(1000)
    b = torch.randn(50, 40, generator=fixed).bfloat16()
    b[3, 4] = version
    return {"a": torch.randn(30, 20, generator=generator), "b": b, "c": torch.randn(9, generator=fixed)}


def write_chain(root: Path, *, base: int, newest: int) -> None:
    """Writes the files that a trainer leaves after `newest - base` updates."""
    root.mkdir()
    write_folder(base_path(root, base), weights_at(base).items(), bucket_bytes=1000, model_folder=None)
    old: dict[str, Bytes] = {name: bytes_of(tensor).copy() for name, tensor in weights_at(base).items()}
    for version in range(base + 1, newest + 1):
        writer = DeltaWriter(delta_path(root, version), before=version - 1, after=version)
        for name, tensor in weights_at(version).items():
            writer.add(name, tensor, old[name])
        writer.finish()
    DeltaIndex(id="one", base=base, deltas=list(range(base + 1, newest + 1))).write(root)


def targets_of(root: Path, weights: Weights) -> list[Tensor]:
    return [weights[name] for name in DeltaWeights(root, applied=None).layout.names]


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_applying_a_delta_gives_the_new_bytes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    numel = data.draw(st.integers(1, 5000))
    old = torch.arange(numel).to(dtype)
    new = old.clone()
    for i in data.draw(st.lists(st.integers(0, numel - 1), max_size=20)):
        new[i] += 1
    path = tmp_path_factory.mktemp("delta") / "d"
    kept = bytes_of(old).copy()
    writer = DeltaWriter(path, before=1, after=2)
    writer.add("w", new, kept)
    checksums, _ = writer.finish()
    reader = DeltaReader(path)
    assert (reader.before, reader.after) == (1, 2)
    (tensor,) = reader.tensors
    assert bool(tensor.pieces) == (not torch.equal(old, new))
    reader.apply(tensor, bytes_of(old))
    assert torch.equal(old, new) and bytes_of(new).tolist() == kept.tolist()
    assert checksums == {"w": checksum(new)}


def test_only_changed_blocks_are_written_and_few_changes_take_few_bytes(tmp_path: Path) -> None:
    old = torch.zeros(3 * PIECE_BYTES // 4)
    old += 0.1
    new = old.clone()
    # Element 17 of block 1: a block has PIECE_BYTES / 4 elements of float32.
    new[PIECE_BYTES // 4 + 17] += 1
    writer = DeltaWriter(tmp_path / "d", before=0, after=1)
    writer.add("w", new, bytes_of(old).copy())
    _, num_bytes = writer.finish()
    (tensor,) = DeltaReader(tmp_path / "d").tensors
    assert [block for block, _, _ in tensor.pieces] == [1]
    assert num_bytes < old.nbytes / 1000


def test_an_engine_reads_only_the_deltas_it_lacks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=6)
    live = weights_at(5)
    # Without the full folder and the older deltas this can only come from the last one.
    for path in (delta_path(root, 4), delta_path(root, 5)):
        path.unlink()
    targets = targets_after(root, live, applied=5)
    DeltaWeights(root, applied=5).write(targets)
    assert equal(live, weights_at(6))


def targets_after(root: Path, weights: Weights, *, applied: int) -> list[Tensor]:
    return [weights[name] for name in DeltaWeights(root, applied=applied).layout.names]


@pytest.mark.parametrize("applied", [None, 1, 99])
def test_an_engine_that_missed_versions_starts_from_the_full_folder(tmp_path: Path, applied: int | None) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=6)
    live = {name: torch.zeros_like(tensor) for name, tensor in weights_at(0).items()}
    sums = DeltaWeights(root, applied=applied).write(targets_of(root, live))
    assert equal(live, weights_at(6))
    assert sums == {name: checksum(tensor) for name, tensor in weights_at(6).items()}


def test_the_error_for_a_missing_link_names_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=6)
    delta_path(root, 5).unlink()
    with pytest.raises(WeightSyncError, match=r"delta_00000005\.rlsd must be a readable delta"):
        DeltaWeights(root, applied=None)
    # A file of another link under the expected name.
    delta_path(root, 6).replace(delta_path(root, 5))
    DeltaIndex(id="one", base=3, deltas=[4, 5]).write(root)
    with pytest.raises(WeightSyncError, match=r"delta_00000005\.rlsd must start from weight version 4, got 5"):
        DeltaWeights(root, applied=None)


def test_a_wrong_assumed_version_is_detected(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=5)
    live = weights_at(3)
    with pytest.raises(WeightSyncError, match="a must arrive with checksum"):
        DeltaWeights(root, applied=4).write(targets_after(root, live, applied=4))


@pytest.mark.parametrize("part", ["header", "payload", "end"])
def test_a_broken_file_is_detected(tmp_path: Path, part: str) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=4)
    path = delta_path(root, 4)
    data = bytearray(path.read_bytes())
    if part == "end":
        del data[-20:]
    else:
        data[40 if part == "header" else DeltaReader(path).payload_start + 30] ^= 1
    path.write_bytes(data)
    live = weights_at(3)
    with pytest.raises(WeightSyncError, match=r"delta_00000004\.rlsd|must arrive"):
        DeltaWeights(root, applied=3).write(targets_after(root, live, applied=3))


def test_announced_checksums_are_compared(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=4)
    announced = {name: checksum(tensor) for name, tensor in weights_at(4).items()}
    DeltaWeights(root, applied=3, announced=announced)
    with pytest.raises(WeightSyncError, match="c must arrive with checksum"):
        DeltaWeights(root, applied=3, announced={**announced, "c": "xxh3:0"})


def test_a_receiver_remembers_its_version_until_other_weights_are_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_chain(root, base=3, newest=4)
    receiver, live = EngineReceiver(), weights_at(0)
    arguments = {"load_format": "delta", "version": 4, "checksums": {}}
    receiver.open_folder(root, **arguments).write(targets_of(root, live))  # type: ignore[arg-type]
    assert equal(live, weights_at(4))
    base = base_path(root, 3)
    base_files = {file: file.read_bytes() for file in base.glob("*.safetensors")}
    for file in base_files:
        file.write_bytes(base_files[file][:-1] + b"\0")  # broken, but not read again
    incoming = receiver.open_folder(root, **arguments)  # type: ignore[arg-type]
    incoming.write(targets_of(root, live))
    receiver.open_folder(base, load_format=None, version=None, checksums={})
    with pytest.raises(WeightSyncError, match="must arrive"):
        receiver.open_folder(root, **arguments).write(targets_of(root, live))  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match="must end at weight version 9, got 4"):
        receiver.open_folder(root, load_format="delta", version=9, checksums={})


def test_a_mirror_is_updated_in_place_and_copied_again_after_an_interruption(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    write_chain(root, base=3, newest=5)
    assert update_mirror(root, mirror) == {name: checksum(tensor) for name, tensor in weights_at(5).items()}
    inodes = {path: path.stat().st_ino for path in mirror.glob("*.safetensors")}
    write_next(root, after=6)
    update_mirror(root, mirror)
    assert {path: path.stat().st_ino for path in mirror.glob("*.safetensors")} == inodes
    assert equal(read(mirror), weights_at(6))
    # A process that is killed while it changes the files leaves no state file.
    mirror.with_name("mirror.json").unlink()
    for tensor in read(mirror).values():
        tensor.zero_()
    update_mirror(root, mirror)
    assert equal(read(mirror), weights_at(6))


def write_next(root: Path, *, after: int) -> None:
    old = {name: bytes_of(tensor).copy() for name, tensor in weights_at(after - 1).items()}
    writer = DeltaWriter(delta_path(root, after), before=after - 1, after=after)
    for name, tensor in weights_at(after).items():
        writer.add(name, tensor, old[name])
    writer.finish()
    index = DeltaIndex.read(root)
    DeltaIndex(id=index.id, base=index.base, deltas=[*index.deltas, after]).write(root)


def read(folder: Path) -> Weights:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in map_file(file).items()}
