"""Megatron-core without CUDA: what its code asks of a GPU is answered by the CPU.

Megatron-core names the device in many places, though what it computes needs none. Two measures make it run on gloo
ranks: attributes of `torch.cuda` that it calls are replaced in this process, and a mode, which torch keeps for each
thread, turns the word `cuda` in calls of torch's functions into `cpu`. Both are tied to the version of its code.

Only a worker process without CUDA installs it: other libraries in the process would meet the replaced functions, too.
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

from rlscale.errors import ConfigError, Problem

VERSION = "0.16."
"""Of Megatron-core; its micro releases have the same code in the places that are replaced."""

_CPU = torch.device("cpu")
_entered = threading.local()
_installed = threading.Event()


def install_cpu_layer() -> None:
    """Makes Megatron-core run in this process without CUDA; does nothing where there is CUDA, or the second time.

    Raises:
        ConfigError: Megatron-core is of another version than the layer was made for.
    """
    if torch.cuda.is_available() or _installed.is_set():
        return
    check_version(megatron.core.__version__)
    for name, replacement in _REPLACED.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, _REPLACED[name])
    # The original one waits for CUDA's first use, which never comes.
    megatron_random._set_cuda_rng_state = _set_rng_state
    moe_utils.te_general_gemm = None  # only set where Transformer Engine is, but always read
    # It returns a tensor on the CPU as it is, where its callers need the array that they ask for.
    moe_utils.maybe_move_tensor_to_cpu = _move_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = _move_to_cpu
    _installed.set()


def check_version(version: str) -> None:
    """Raises ConfigError for a version of Megatron-core that the layer was not made for."""
    if not version.startswith(VERSION):
        rule, value = f"have megatron-core {VERSION}x to run without CUDA", f"megatron with megatron-core {version}"
        fix = "pip install 'rlscale[megatron]', or choose train=fsdp"
        raise ConfigError([Problem(path="train.backend", rule=rule, value=value, fix=fix)])


@contextmanager
def megatron_device() -> Iterator[None]:
    """In here this thread may call Megatron-core: on CUDA as it is, else with the CPU in CUDA's place.

    Installs the layer if needed. May be entered again inside of itself; each thread enters for itself.
    """
    if torch.cuda.is_available() or getattr(_entered, "is_inside", False):
        yield
        return
    install_cpu_layer()
    _entered.is_inside = True
    try:
        with _CpuMode():
            yield
    finally:
        _entered.is_inside = False


class _CpuMode(TorchFunctionMode):
    """`cuda` means the CPU in every call of a function of torch by this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_CPU if _is_cuda(each) else each for each in args)
        elif func is Tensor.type and len(args) == 1 and not kwargs:
            return _type_name(args[0], caller=sys._getframe(1).f_globals.get("__name__", ""))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return func(*args, **kwargs)


def _type_name(tensor: Tensor, *, caller: str) -> str:
    """The optimizers of Megatron-core sort parameters by the names of types on CUDA."""
    name = tensor.type()
    return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.") else name


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _Event:
    """Work on a CPU is done when the call returns: there is nothing to wait for."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 0.0


class _Stream:
    """A class, not a function: other libraries use the name in annotations."""

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
"""Attributes of `torch.cuda` that Megatron-core calls, and what they are without CUDA."""
