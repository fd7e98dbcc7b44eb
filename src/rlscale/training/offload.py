"""Who of the models is on the device: those that share a GPU take turns on it, and leave it to the engines.

    train:     [policy scores] [reference] [teacher] [critic scores] [policy + optimiser] [critic + optimiser]
    weights:   [policy]
    otherwise: nobody

`move` copies a model's storages to the host and frees them on the device, in place: parameters, moments and what FSDP
keeps beside them go on pointing at the same storages. `tms` has torch_memory_saver unmap all memory of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlscale.config import OffloadMode
from rlscale.errors import ConfigError, Problem
from rlscale.training.spec import OffloadSpec

Tensors = Callable[[], Iterable[Tensor]]
"""What a role has on the device at the moment; optimisers make theirs with the first step."""


class Offloader(Protocol):
    """One for a trainer rank. Roles go by name, e.g. `policy`, `policy.optimizer`."""

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None:
        """Has a role take part; it is on the device.

        Args:
            name: of the role.
            tensors: what leaves with it.
            is_frozen: nothing changes them but who calls `changed`.
            scratch: likewise of the role, without a content that is needed again.
        """
        ...

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        """Has these roles on the device, whoever else is on it may have to leave."""
        ...

    def changed(self, name: str) -> None:
        """A frozen role has other weights than before."""
        ...

    def rest(self) -> None:
        """Leaves the device to the engines, until the next `of`."""
        ...


class NoOffload:
    """All roles stay on the device: `cluster.offload_train` is off."""

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None: ...

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        yield

    def changed(self, name: str) -> None: ...

    def rest(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Role:
    tensors: Tensors
    is_frozen: bool
    scratch: Tensors
    is_here: bool = True
    away: list[tuple[torch.UntypedStorage, Tensor]] = field(default_factory=list)  # storage and its copy on the host
    emptied: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # scratch and its bytes
    copies: dict[int, Tensor] = field(default_factory=dict)  # kept ones, by storage
    is_known: bool = False  # whether `copies` hold what is on the device


class CpuOffload:
    """Roles leave for the host's memory and come back.

    Invariant: outside of `of` after `rest`, no storage of any role has a byte on the device.

    Args:
        keeps_copies: hold on to the memory on the host while a role is on the device: it need not be taken (and
            pinned) again, and a role that did not change need not be copied.
    """

    def __init__(self, device: torch.device, *, keeps_copies: bool) -> None:
        self._device, self._keeps_copies = device, keeps_copies
        self._roles: dict[str, _Role] = {}

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None:
        assert name not in self._roles, f"{name} takes part already"
        self._roles[name] = _Role(tensors=tensors, is_frozen=is_frozen, scratch=scratch)

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        for name, role in self._roles.items():
            if name not in names:
                self._leave(role)
        for name in names:
            if name in self._roles:
                self._come(self._roles[name])
        yield

    def changed(self, name: str) -> None:
        if name in self._roles:
            self._roles[name].is_known = False

    def rest(self) -> None:
        for role in self._roles.values():
            self._leave(role)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave(self, role: _Role) -> None:
        if not role.is_here:
            return
        for storage in _storages(role.tensors()):
            if storage.device.type != self._device.type:
                continue  # an optimiser may keep its moments on the host anyway
            copy = role.copies.get(storage._cdata)
            if copy is None:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            if not (role.is_frozen and role.is_known):
                copy.copy_(_bytes(storage))
            storage.resize_(0)
            role.away.append((storage, copy))
        for storage in _storages(role.scratch()):
            role.emptied.append((storage, storage.nbytes()))
            storage.resize_(0)
        role.is_here, role.is_known = False, True

    def _come(self, role: _Role) -> None:
        if role.is_here:
            return
        for storage, copy in role.away:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        # By the identity of the storage, which outlives being emptied.
        role.copies = {storage._cdata: copy for storage, copy in role.away} if self._keeps_copies else {}
        role.is_known = self._keeps_copies
        for storage, num_bytes in role.emptied:
            storage.resize_(num_bytes)
        role.away, role.emptied, role.is_here = [], [], True


class MemorySaver(Protocol):
    """What is used of `torch_memory_saver.torch_memory_saver`."""

    memory_margin_bytes: int

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class MemorySaverOffload:
    """The memory of the whole process is unmapped while the engines have the GPU; its addresses stay.

    All roles come and go together. The process was started with the saver's library, see `saver_variables`.
    """

    def __init__(self, saver: MemorySaver, *, margin_bytes: int) -> None:
        self._saver, self._is_here = saver, True
        saver.memory_margin_bytes = margin_bytes

    def add(self, name: str, tensors: Tensors, *, is_frozen: bool = False, scratch: Tensors = tuple) -> None: ...

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        if not self._is_here:
            self._saver.resume()
            self._is_here = True
        yield

    def changed(self, name: str) -> None: ...

    def rest(self) -> None:
        if self._is_here:
            torch.cuda.empty_cache()  # what the allocator only holds on to need not be backed up
            self._saver.pause()
            self._is_here = False


def make_offloader(offload: OffloadSpec | None, *, device: torch.device) -> Offloader:
    """Those of a spec. Raises ConfigError where the memory saver cannot be used."""
    if offload is None:
        return NoOffload()
    if offload.mode == OffloadMode.move:
        return CpuOffload(device, keeps_copies=offload.keeps_copies)
    return MemorySaverOffload(_memory_saver(), margin_bytes=offload.margin_bytes)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors an optimiser keeps."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _memory_saver() -> MemorySaver:
    try:
        # Imported here: it is there, and of use, only where there are GPUs.
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        rule, fix = "be move without torch_memory_saver", "install it: pip install torch_memory_saver"
        problem = Problem(path="cluster.offload_train_mode", rule=rule, value="tms", fix=f"{fix} ({error})")
        raise ConfigError([problem]) from error
    saver: MemorySaver = torch_memory_saver
    return saver


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage once, without empty ones."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
    return view
