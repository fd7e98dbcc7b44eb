"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft: added to a model, merged for engines, saved in peft's format.

A layer with weight W [out, in] acts as W + scale * B A, with A [rank, in], B [out, rank] and scale = alpha / rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.config import LoraConfig
from rlscale.errors import ConfigError, Problem
from rlscale.models.adapter_targets import (
    ADAPTER_CONFIG,
    check_linear,
    check_scale,
    check_targets,
    layers_without_adapters,
)

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

ADAPTER = "default"
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", ADAPTER_CONFIG
_PREFIX = "base_model.model."
"""Prefix of parameter names in peft's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Adapter of one layer."""

    a: Tensor
    b: Tensor
    scale: float


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> None:
    """Adds adapters to the linear layers of a model, in place. Only the adapters require a gradient afterwards.

    Args:
        model: not sharded yet.
        lora: of rank 1 or more.
        seed: of A, the same on all ranks; B starts at 0.

    Raises:
        ConfigError: the model has no such layers, they belong to experts, `lora.load` does not fit them, or peft is
            not installed.
    """
    try:
        # Imported here: peft is optional.
        from peft import inject_adapter_in_model
    except ImportError as error:
        fix = f"{error}; pip install 'rlscale[lora]'"
        raise _problem("rank", "be 0 without peft", str(lora.rank), fix) from error
    linear = _linear_layers(model)
    problems = check_targets(lora.target_modules, dict(model.named_parameters()), linear=linear)
    problems = problems or check_linear(
        [each for each in lora.target_modules or () if each.rpartition(".")[2] not in linear], linear=linear
    )
    if problems:
        raise ConfigError(problems)
    # A fork of the generator: all ranks draw the same A, and the states of training stay.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            targets = lora.target_modules or sorted(linear - layers_without_adapters(dict(model.named_parameters())))
            with _host_placeholders(model):
                inject_adapter_in_model(_peft_config(lora.rank, lora.alpha, targets), model, ADAPTER)
            if any(each.a.dim() != 2 for each in find_adapters(model).values()):
                raise ValueError("no weight sync and no export merges adapters of convolutions")
        except ValueError as error:
            rule, value = "name linear layers of the model", str(lora.target_modules)
            raise _problem("target_modules", rule, value, f"it has {', '.join(sorted(linear))}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    if lora.load is not None:
        _load(model, Path(os.path.expanduser(lora.load)), alpha=lora.alpha)


@contextmanager
def _host_placeholders(model: nn.Module) -> Iterator[None]:
    """Shows peft weights on the CPU, without memory, instead of those on the meta device.

    peft moves a new adapter to the device of its layer. On the meta device it would lose the values that were drawn.
    """
    hidden = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in hidden:
        # Past `register_parameter`, which copies nothing either, but calls hooks.
        module._parameters[name] = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in hidden:
            module._parameters[name] = parameter


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Adapters by the name that their weight has in the model without adapters."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = (getattr(layer, part)[ADAPTER].weight for part in ("lora_A", "lora_B"))
            found[f"{name}.weight"] = Adapter(a=a, b=b, scale=float(layer.scaling[ADAPTER]))
    return found


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes the model its base inside; for passes without gradient."""
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    # Not peft's `enable_adapters`: it changes `requires_grad`, which FSDP reads once when it shards.
    for layer in layers:
        layer.__dict__["_disable_adapters"] = True
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__["_disable_adapters"] = False


def base_name(name: str) -> str | None:
    """Name of a parameter in the model without adapters; None for parameters of adapters."""
    # peft may wrap a module twice, e.g. for two parameters of a stack of experts.
    return None if _is_adapter(name) else re.sub(r"(\.base_layer)+\.", ".", name)


def merge_adapter(weight: Tensor, adapter: Adapter, *, dtype: torch.dtype) -> Tensor:
    """W + scale * B A, computed in float32 and sharded as W; a collective of the ranks that share W."""
    if not isinstance(weight, DTensor):
        return (weight.float() + adapter.scale * (adapter.b.float() @ adapter.a.float())).to(dtype)
    a, b = adapter.a, adapter.b
    assert isinstance(a, DTensor) and isinstance(b, DTensor), "adapters are sharded with their layer"
    rows = merge_rows(weight.to_local(), adapter, full_a=a.full_tensor(), dtype=dtype)
    return DTensor.from_local(rows, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


def merge_rows(rows: Tensor, adapter: Adapter, *, full_a: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `merge_adapter`, for this rank's rows of W; B is sharded by the same rows. No collective."""
    b = adapter.b.to_local() if isinstance(adapter.b, DTensor) else adapter.b
    return (rows.float() + adapter.scale * (b.float() @ full_a.float())).to(dtype)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A and B of every layer in full, under peft's names; a collective of all ranks."""
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            own = parameter.detach()
            yield _peft_name(name), own.full_tensor() if isinstance(own, DTensor) else own


def save_adapters(model: nn.Module, folder: Path, *, base: str) -> None:
    """Writes the adapters in float32, in peft's format; a collective of all ranks, rank 0 writes.

    Args:
        model: with adapters, sharded or not.
        folder: created if needed.
        base: Hugging Face folder or hub id of the model without adapters.
    """
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    some = next(iter(layers.values()))
    rank, alpha = (int(getattr(some, figure)[ADAPTER]) for figure in ("r", "lora_alpha"))
    config = {"r": rank, "lora_alpha": alpha, "target_modules": sorted({name.split(".")[-1] for name in layers})}
    write_adapters(adapter_tensors(model), folder, config=config, base=base)


def write_adapters(named: Iterable[tuple[str, Tensor]], folder: Path, *, config: Mapping[str, Any], base: str) -> None:
    """Like `save_adapters`, for adapters that rank 0 gets in full.

    Args:
        named: A and B under peft's names; iterated on all ranks.
        folder: created if needed.
        config: rank, alpha and layers, by peft's keys.
        base: Hugging Face folder or hub id of the model without adapters.
    """
    tensors = {name: full.float().cpu().contiguous() for name, full in named if dist.get_rank() == 0}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        written = _peft_config(config["r"], config["lora_alpha"], config["target_modules"])
        written.base_model_name_or_path, written.inference_mode = base, True
        written.save_pretrained(str(folder))
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    dist.barrier()


@torch.no_grad()
def _load(model: nn.Module, folder: Path, *, alpha: int) -> None:
    try:
        found = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        fix = f"{type(error).__name__}: {error}; give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        raise _problem("load", "be a folder of adapters in peft's format", str(folder), fix) from error
    wanted = {_peft_name(name): parameter for name, parameter in model.named_parameters() if _is_adapter(name)}
    _check_fit(folder, found, wanted)
    if problems := check_scale(folder, alpha=alpha):
        raise ConfigError(problems)
    for name, parameter in wanted.items():
        parameter.copy_(found[name])


def _check_fit(folder: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    unexpected = sorted(found.keys() ^ wanted.keys())
    unexpected += [name for name in found if name in wanted and found[name].shape != wanted[name].shape]
    if unexpected:
        name = unexpected[0]

        shapes = [tuple(each[name].shape) if name in each else "no tensor" for each in (found, wanted)]
        fix = (
            f"{name}: {shapes[0]} in the folder, {shapes[1]} in the model; check train.lora.rank and "
            "train.lora.target_modules"
        )
        raise _problem("load", "contain adapters of this model and rank", str(folder), fix)


def _peft_config(rank: int, alpha: int, targets: Sequence[str]) -> PeftConfig:
    # Imported here: peft is optional.
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )


def _linear_layers(model: PreTrainedModel) -> set[str]:
    """Last parts of the names of the linear layers, without the output layer.

    peft finds layers by them: without parts that other modules have, too, such as numbers and, in a vision tower, the
    convolution over patches.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    named = [(name.rpartition(".")[2], part) for name, part in model.named_modules() if part is not head]
    others = {name for name, part in named if not isinstance(part, nn.Linear)}
    return {name for name, _ in named} - others


def _peft_name(name: str) -> str:
    """Name of an adapter's parameter in peft's files, which name neither the adapter nor our wrapper."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def peft_names(layer: str) -> tuple[str, str]:
    """Names of A and B of a layer in peft's files."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _problem(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=f"train.lora.{key}", rule=rule, value=value, fix=fix)])
