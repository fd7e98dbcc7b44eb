"""Offloading of models that share a GPU with each other or with the engines.

    train:     [policy scores] [reference] [teacher] [critic scores] [policy + optimiser] [critic + optimiser]
    weights:   [policy]
    otherwise: no model is on the device

`move` copies a model's storages to the host and frees them on the device, in place: parameters, moments and FSDP's own
views keep pointing at the same storages. `tms` lets torch_memory_saver unmap all device memory of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlscale.config import OffloadMode
from rlscale.errors import ConfigError, Problem
from rlscale.training.spec import OffloadSpec

Tensors = Callable[[], Iterable[Tensor]]
"""Tensors of a model that are on the device at the time of the call; optimisers allocate theirs in the first step."""


class Offloader(Protocol):
    """Decides which models of a rank are on its device. Models have names, e.g. `policy`, `policy.optimizer`."""

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None:
        """Registers a model that is on the device.

        Args:
            name: of the model.
            tensors: storages that are offloaded.
            is_frozen: the weights change only before `mark_dirty`.
            scratch: storages that are freed without a copy: their content is not needed again.
        """
        ...

    def mapped(self) -> AbstractContextManager[None]:
        """Context in which memory of the device may be allocated and used, also beyond that of the models."""
        ...

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        """Moves these models to the device, and others off it where there is no room for both."""
        ...

    def mark_dirty(self, name: str) -> None:
        """Reports that the weights of a frozen model have changed."""
        ...

    def offload_all(self) -> None:
        """Moves every model off the device, until the next `resident`."""
        ...

    def exportable(self) -> AbstractContextManager[None]:
        """Context in which new device memory can be opened by other processes (CUDA IPC).

        It can also be used while the models are off the device.
        """
        ...


class NoOffload:
    """All models stay on the device: `cluster.offload_train` is off."""

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None: ...

    def mapped(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        yield

    def mark_dirty(self, name: str) -> None: ...

    def offload_all(self) -> None: ...

    def exportable(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(kw_only=True, slots=True)
class _Model:
    tensors: Tensors
    is_frozen: bool
    scratch: Tensors
    is_resident: bool = True
    offloaded: list[tuple[torch.UntypedStorage, Tensor]] = field(default_factory=list)  # storage and its host copy
    freed: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # scratch storage and its bytes
    copies: dict[int, Tensor] = field(default_factory=dict)  # host memory that is kept, by storage
    is_copied: bool = False  # `copies` hold the content of the device


class CpuOffload:
    """Moves models to host memory and back.

    Invariant: between `offload_all` and the next `resident`, no storage of any model has a byte on the device.

    Args:
        keeps_copies: keep the host memory while a model is on the device: it need not be allocated (and pinned) again,
            and an unchanged model need not be copied.
    """

    def __init__(self, device: torch.device, *, keeps_copies: bool) -> None:
        self._device, self._keeps_copies = device, keeps_copies
        self._models: dict[str, _Model] = {}

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None:
        assert name not in self._models, f"{name} is registered already"
        self._models[name] = _Model(tensors=tensors, is_frozen=is_frozen, scratch=scratch)

    def mapped(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        # The others leave first: the device may have no room for both.
        for name, model in self._models.items():
            if name not in names:
                self._to_host(model)
        for name in names:
            if name in self._models:
                self._to_device(self._models[name])
        yield

    def mark_dirty(self, name: str) -> None:
        if name in self._models:
            self._models[name].is_copied = False

    def offload_all(self) -> None:
        for model in self._models.values():
            self._to_host(model)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # engines are other processes: they cannot use what the allocator keeps

    def exportable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _to_host(self, model: _Model) -> None:
        if not model.is_resident:
            return
        for storage in _storages(model.tensors()):
            if storage.device.type != self._device.type:
                continue  # e.g. the moments of an optimiser that keeps them on the host
            copy = model.copies.get(storage._cdata)
            if copy is None:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            if not (model.is_frozen and model.is_copied):
                copy.copy_(_bytes(storage))
            storage.resize_(0)
            model.offloaded.append((storage, copy))
        for storage in _storages(model.scratch()):
            model.freed.append((storage, storage.nbytes()))
            storage.resize_(0)
        model.is_resident, model.is_copied = False, True

    def _to_device(self, model: _Model) -> None:
        if model.is_resident:
            return
        for storage, copy in model.offloaded:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        # By the identity of the storage, which survives resizing to 0.
        model.copies = {storage._cdata: copy for storage, copy in model.offloaded} if self._keeps_copies else {}
        model.is_copied = self._keeps_copies
        for storage, num_bytes in model.freed:
            storage.resize_(num_bytes)
        model.offloaded, model.freed, model.is_resident = [], [], True


class MemorySaver(Protocol):
    """Part of `torch_memory_saver.torch_memory_saver` that is used here."""

    memory_margin_bytes: int

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def disable(self) -> AbstractContextManager[None]: ...


class MemorySaverOffload:
    """Unmaps the device memory of the whole process while the engines use the GPU; its addresses stay valid.

    All models are offloaded and restored together. The process must start with the saver's library preloaded, see
    `saver_variables`.
    """

    def __init__(self, saver: MemorySaver, *, margin_bytes: int) -> None:
        self._saver, self._is_resident = saver, True
        saver.memory_margin_bytes = margin_bytes

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None: ...

    @contextmanager
    def mapped(self) -> Iterator[None]:
        # While the saver is paused, a new tensor may get a free block of unmapped memory.
        if not self._is_resident:
            self._saver.resume()
            self._is_resident = True
        yield

    @contextmanager
    def resident(self, *names: str) -> Iterator[None]:
        with self.mapped():
            yield

    def mark_dirty(self, name: str) -> None: ...

    def offload_all(self) -> None:
        if self._is_resident:
            torch.cuda.empty_cache()  # unused blocks of the allocator need no backup
            self._saver.pause()
            self._is_resident = False

    def exportable(self) -> AbstractContextManager[None]:
        # The saver maps memory by cuMemMap, of which CUDA gives out no IPC handles.
        return self._saver.disable()


def make_offloader(offload: OffloadSpec | None, *, device: torch.device) -> Offloader:
    """Builds the offloader of a spec. Raises ConfigError where the memory saver is not installed."""
    if offload is None:
        return NoOffload()
    if offload.mode == OffloadMode.move:
        return CpuOffload(device, keeps_copies=offload.keeps_copies)
    return MemorySaverOffload(_memory_saver(), margin_bytes=offload.margin_bytes)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors in the state of an optimiser."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@cache
def _memory_saver() -> MemorySaver:
    try:
        # Imported here: the package exists, and is useful, only on machines with GPUs.
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        rule, fix = "be move without torch_memory_saver", "install it: pip install torch_memory_saver"
        problem = Problem(path="cluster.offload_train_mode", rule=rule, value="tms", fix=f"{fix} ({error})")
        raise ConfigError([problem]) from error
    # Megatron-core selects the other mode when it is imported. In that mode the saver does not know the library that is
    # preloaded and has all memory: pausing would free none, and nothing could be exported.
    torch_memory_saver.hook_mode = "preload"
    saver: MemorySaver = torch_memory_saver
    return saver


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yields each storage once, without empty ones."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as a tensor of bytes, without a copy."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
    return view
