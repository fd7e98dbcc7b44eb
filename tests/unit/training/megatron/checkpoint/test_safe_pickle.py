"""What is read of a checkpoint of Megatron-core runs no code that it names."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from rlscale.errors import DataError
from rlscale.training.megatron.checkpoint.safe_pickle import METADATA, restricted_pickle


class Sneaky:
    """A file of it writes another one when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.target),))


def write_metadata(folder: Path, **more: Any) -> Metadata:
    properties = TensorProperties(dtype=torch.bfloat16)
    tensor = TensorStorageMetadata(properties=properties, size=torch.Size([2]), chunks=[])
    content = Metadata(state_dict_metadata={"weight": tensor}, **more)
    (folder / METADATA).write_bytes(pickle.dumps(content))
    return content


def read_metadata(folder: Path) -> Any:
    """As torch reads it inside of Megatron-core."""
    with restricted_pickle(folder):
        return pickle.loads((folder / METADATA).read_bytes())


def test_metadata_of_tensors_is_read(tmp_path: Path) -> None:
    written = write_metadata(tmp_path)
    assert read_metadata(tmp_path).state_dict_metadata == written.state_dict_metadata


def test_metadata_that_names_a_function_is_refused_before_it_is_called(tmp_path: Path) -> None:
    write_metadata(tmp_path, planner_data=Sneaky(tmp_path / "made"))
    with (
        pytest.raises(
            DataError,
            match=r"/\.metadata must contain only values that Megatron-core writes, got the name posix\.mkdir",
        ),
        restricted_pickle(tmp_path),
    ):
        pytest.fail("nobody gets to read it")
    assert not (tmp_path / "made").exists()


class Member:
    """Pickled as Python up to 3.11.3 pickles a member of an enumeration; of other classes nobody may ask that."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.owner, self.name))


def test_members_of_enumerations_are_read_however_they_are_pickled(tmp_path: Path) -> None:
    write_metadata(tmp_path, planner_data=Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert read_metadata(tmp_path).planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(("owner", "name"), [(_MEM_FORMAT_ENCODING, "__init_subclass__"), (Metadata, "__init__")])
def test_other_attributes_are_refused(tmp_path: Path, owner: type, name: str) -> None:
    write_metadata(tmp_path, planner_data=Member(owner, name))
    with pytest.raises(DataError, match=f"got the attribute {name} of"), restricted_pickle(tmp_path):
        pytest.fail("nobody gets to read it")


def test_objects_are_read_as_plain_values(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    torch.save({"common": Sneaky(tmp_path / "made")}, tmp_path / "common.pt")
    with restricted_pickle(tmp_path), pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        torch.load(tmp_path / "common.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
