"""Patches that run Megatron-core without CUDA: its calls for a GPU are served by the CPU.

Megatron-core names the device in many places, although its computation does not need a GPU. Two measures make it run
on gloo ranks: attributes of `torch.cuda` that it calls are replaced in this process, and a torch function mode, which
is per thread, replaces `cuda` by `cpu` in the arguments of torch functions. Both depend on the version of its code.

Only a worker process without CUDA installs the patches: other libraries in the process would see them as well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlscale.training.megatron.versions import check_version

_CPU = torch.device("cpu")
_entered = threading.local()
_installed = threading.Event()


def install_cpu_patches() -> None:
    """Installs the patches; does nothing where CUDA is available, or at further calls.

    Raises:
        ConfigError: the version of Megatron-core is not supported.
    """
    if torch.cuda.is_available() or _installed.is_set():
        return
    check_version(megatron.core.__version__)
    for name, replacement in _REPLACED.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, _REPLACED[name])
    # The original is queued until CUDA is initialised, which never happens here.
    megatron_random._set_cuda_rng_state = _set_rng_state
    # The original returns a CPU tensor unchanged, where its callers need the requested numpy array.
    moe_utils.maybe_move_tensor_to_cpu = _move_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = _move_to_cpu
    _installed.set()


@contextmanager
def megatron_device() -> Iterator[None]:
    """Allows this thread to call Megatron-core: as it is on CUDA, else with the CPU in place of CUDA.

    Installs the patches if needed, and on both a name that is missing without Transformer Engine. Reentrant; each
    thread enters for itself.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        # Only defined where Transformer Engine is installed, but always read, on a GPU too.
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available() or getattr(_entered, "is_inside", False):
        yield
        return
    install_cpu_patches()
    _entered.is_inside = True
    try:
        with _CpuMode():
            yield
    finally:
        _entered.is_inside = False


class _CpuMode(TorchFunctionMode):
    """Replaces `cuda` by the CPU in every torch function that this thread calls."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_CPU if _is_cuda(each) else each for each in args)
        elif func is Tensor.type and len(args) == 1 and not kwargs:
            # Frame 1 is the caller of Tensor.type.
            return _type_name(args[0], caller=sys._getframe(1).f_globals.get("__name__", ""))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return func(*args, **kwargs)


def _type_name(tensor: Tensor, *, caller: str) -> str:
    """Name of a tensor's type. Megatron-core's optimisers group parameters by the names of CUDA types."""
    name = tensor.type()
    return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.") else name


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _Event:
    """A CUDA event that is always complete: work on a CPU is done when the call returns."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 0.0


class _Stream:
    """A CUDA stream without an effect. It is a class because other libraries use the name in annotations."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


_THE_STREAM = _Stream()


def _set_rng_state(new_state: Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_REPLACED: Mapping[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": _set_rng_state,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda device=None: _THE_STREAM,
    "default_stream": lambda device=None: _THE_STREAM,
    "stream": lambda stream: nullcontext(),
}
"""Attributes of `torch.cuda` that Megatron-core calls, and their replacements without CUDA."""
