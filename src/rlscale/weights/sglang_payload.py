"""Tensors in the form that a real SGLang server reads: a pickle, of weights with handles of shared memory.

The pickle is written here and read by SGLang's own server, through its allow-list of types; no server of rlscale reads
one. That of weights is for a server on this machine: it contains handles, not bytes. That of adapters has the bytes.
"""

import base64
import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from rlscale.weights.buckets import Named

_DEVICE_INDEX = 6  # of the device among the arguments of torch's rebuild_cuda_tensor
_strategy_lock = threading.Lock()


class SharedStaging:
    """Reusable CPU memory that another process can open by its name."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def copy_in(self, named: Sequence[Named]) -> list[Named]:
        """Returns copies of the tensors in this memory; the copies of the previous call are lost."""
        num_bytes = sum(_aligned(tensor.nbytes) for _, tensor in named)
        if self._flat.numel() < num_bytes:
            storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
            self._flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        # Every tensor starts at a multiple of 64 bytes, so that a view of any dtype is aligned.
        copies, start = [], 0
        for name, tensor in named:
            view = self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append((name, view.copy_(tensor.detach())))
            start += _aligned(tensor.nbytes)
        return copies


def serialize(named: Sequence[Named]) -> str:
    """Returns base64 of the pickle. The tensors must stay unchanged until the server has answered."""
    buffer = io.BytesIO()
    with _strategy_lock:
        # The default strategy passes open descriptors, which a server that is no child of this process cannot receive.
        before = mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
        mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            _Pickler(buffer).dump([(name, tensor.detach()) for name, tensor in named])
        finally:
            mp.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()


def serialize_bytes(tensors: Mapping[str, Tensor]) -> str:
    """Returns base64 of a pickle of tensors on the CPU by name, with their bytes."""
    # A clone: the pickle of a view would have the whole storage.
    return base64.b64encode(pickle.dumps({name: tensor.detach().clone() for name, tensor in tensors.items()})).decode()


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID, as SGLang does: the server may number the machine's GPUs differently."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_INDEX]).uuid)
            return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])
        return NotImplemented


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
