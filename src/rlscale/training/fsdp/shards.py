"""Shards of a rank: the rows of each parameter that it holds, and their loading from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlscale.models.hf_weights import HfWeights
from rlscale.training.modules.lora import base_name
from rlscale.training.optim.muon import local_shard


@torch.no_grad()
def load_shards(model: PreTrainedModel, weights: HfWeights, *, mesh: DeviceMesh) -> None:
    """Allocates the parameters that are on the meta device, and fills them and all persistent buffers; no collective.

    Parameters with values, i.e. adapters and new heads, keep them.

    Raises:
        ConfigError: a weight is not in the files, or has another shape.
    """
    names = {name: base_name(name) or name for name, parameter in model.named_parameters() if _is_meta(parameter)}
    buffers = dict(persistent_buffers(model))
    weights.check([*names.values(), *buffers])
    _allocate(model, device=torch.device(mesh.device_type))
    parameters = dict(model.named_parameters())
    for name, plain in names.items():
        parameter = parameters[name].detach()
        weights.copy_rows(plain, local_shard(parameter), first=first_row(parameter))
    for name, buffer in buffers.items():
        weights.copy_rows(name, buffer, first=0)


def first_row(parameter: Tensor) -> int:
    """Index of the first row of this rank's shard. Every rank has as many rows as the first, as long as there are."""
    if not isinstance(parameter, DTensor):
        return 0
    num_rows, mesh = parameter.shape[0], parameter.device_mesh
    return min(mesh.get_local_rank() * rows_per_rank(num_rows, mesh.size()), num_rows)


def rows_per_rank(num_rows: int, num_ranks: int) -> int:
    """Rows of a shard; the last ranks may have fewer, or none."""
    return -(-num_rows // num_ranks)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields weights that are buffers and not trained, in their own dtype: the bias of DeepSeek-V3's router."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer.detach()


def _allocate(model: PreTrainedModel, *, device: torch.device) -> None:
    """Replaces parameters on the meta device by empty ones. FSDP then pads its shards; tied ones stay tied."""
    if isinstance(model, FSDPModule):
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if _is_meta(tensor) else tensor)  # type: ignore[no-untyped-call]
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_meta(parameter):
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"
