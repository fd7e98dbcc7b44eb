"""Weights as a folder: the files are safetensors, and the error for a changed tensor names it."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlscale.algo.checksum import checksum
from rlscale.errors import WeightSyncError
from rlscale.weights.safetensors_folder import (
    FolderWeights,
    map_file,
    read_checksums,
    start_folder,
    write_file,
    write_files,
)
from tests.tiny_weights import make_weights, write_folder


def write_version(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write_folder(folder / "v1", make_weights().items(), bucket_bytes=4096, model_folder=model)
    return folder / "v1"


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    folder = write_version(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == make_weights().keys()
    for name, tensor in make_weights().items():
        read = load_file(folder / index[name])[name]
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert read_checksums(folder) == {name: checksum(tensor) for name, tensor in make_weights().items()}
    assert (folder / "config.json").exists() and not list(tmp_path.glob("*.writing"))


def test_tensors_of_every_dtype_without_dimensions_or_elements(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in dtypes} | {
        "scalar": torch.tensor(2.0),
        "empty": torch.ones(0),
    }
    for name, tensor in tensors.items():
        write_file(tmp_path / "f.safetensors", [(name, tensor)])
        read = load_file(tmp_path / "f.safetensors")[name]
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert checksum(read) == checksum(tensor)


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    def broken() -> object:
        yield from list(make_weights().items())[:2]
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "v1", broken(), bucket_bytes=100, model_folder=None)  # type: ignore[arg-type]
    assert not (tmp_path / "v1").exists()
    write_folder(tmp_path / "v1", make_weights().items(), bucket_bytes=100, model_folder=None)
    assert not (tmp_path / "v1.writing").exists()


def test_weights_are_written_into_targets_of_any_dtype(tmp_path: Path) -> None:
    incoming = FolderWeights(write_version(tmp_path), {})
    targets = [torch.zeros(shape, dtype=torch.float64) for shape in incoming.layout.shapes]
    assert incoming.write(targets) == {name: checksum(tensor) for name, tensor in make_weights().items()}
    for name, target in zip(incoming.layout.names, targets, strict=True):
        assert torch.equal(target, make_weights()[name].double())


def test_the_error_for_a_flipped_bit_or_a_missing_file_names_the_tensor(tmp_path: Path) -> None:
    folder = write_version(tmp_path)
    file = next(f for f in folder.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    data = bytearray(file.read_bytes())
    # The last byte of the file is data, not header.
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight must arrive with checksum"):
        FolderWeights(folder, {}).write(None)
    file.unlink()
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight must be in"):
        FolderWeights(folder, {})


def test_a_folder_of_another_program_needs_no_checksums(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert FolderWeights(tmp_path, {}).write(None) == {"w": checksum(torch.ones(3))}


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage"])
def test_a_folder_without_weights_is_a_value_error(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "f"
    if kind != "missing":
        folder.mkdir()
    if kind == "garbage":
        (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="must be a"):
        FolderWeights(folder, {})


def test_a_mapped_file_is_the_file(tmp_path: Path) -> None:
    write_file(tmp_path / "f.safetensors", [("w", torch.ones(5)), ("v", torch.zeros(2, 2))])
    map_file(tmp_path / "f.safetensors")["v"][1, 1] = 7
    assert load_file(tmp_path / "f.safetensors")["v"].tolist() == [[0, 0], [0, 7]]


def test_a_bucket_is_freed_before_the_next_is_filled(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    peaks = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(12):
            tensor = torch.full((256,), float(i))
            alive.append(weakref.ref(tensor))
            peaks.append(sum(each() is not None for each in alive))
            yield f"weight {i}", tensor
            del tensor

    start_folder(tmp_path / "v1")
    written = write_files(tmp_path / "v1", weights(), bucket_bytes=4 * 1024)
    assert written.num_files == 3 and len(written.checksums) == 12
    # Four tensors of a full bucket, and the one that did not fit.
    assert max(peaks) <= 5
