"""Reading a checkpoint of Megatron-core runs no code from it."""

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


class MaliciousObject:
    """Creates a folder when it is unpickled."""

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
    """Reads the metadata as torch does inside of Megatron-core."""
    with restricted_pickle(folder):
        return pickle.loads((folder / METADATA).read_bytes())


def test_metadata_of_tensors_is_read(tmp_path: Path) -> None:
    written = write_metadata(tmp_path)
    assert read_metadata(tmp_path).state_dict_metadata == written.state_dict_metadata


def test_metadata_with_a_function_is_rejected_before_the_call(tmp_path: Path) -> None:
    write_metadata(tmp_path, planner_data=MaliciousObject(tmp_path / "made"))
    with (
        pytest.raises(
            DataError,
            match=r"/\.metadata must contain only values that Megatron-core writes, got the name posix\.mkdir",
        ),
        restricted_pickle(tmp_path),
    ):
        pytest.fail("the context must not be entered")
    assert not (tmp_path / "made").exists()


class PickledMember:
    """Pickled as a call of getattr, as Python up to 3.11.3 pickles a member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.owner, self.name))


def test_members_of_enumerations_are_read_in_both_pickled_forms(tmp_path: Path) -> None:
    write_metadata(tmp_path, planner_data=PickledMember(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert read_metadata(tmp_path).planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(("owner", "name"), [(_MEM_FORMAT_ENCODING, "__init_subclass__"), (Metadata, "__init__")])
def test_other_attributes_are_rejected(tmp_path: Path, owner: type, name: str) -> None:
    write_metadata(tmp_path, planner_data=PickledMember(owner, name))
    with pytest.raises(DataError, match=f"got the attribute {name} of"), restricted_pickle(tmp_path):
        pytest.fail("the context must not be entered")


def test_other_files_are_read_with_plain_types_only(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    torch.save({"common": MaliciousObject(tmp_path / "made")}, tmp_path / "common.pt")
    with restricted_pickle(tmp_path), pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        torch.load(tmp_path / "common.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
