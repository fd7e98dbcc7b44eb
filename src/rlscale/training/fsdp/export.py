"""Full weights of a sharded model, for engines and for transformers.

shards ─ cast, adapters merged ─ bucket by bucket to the rank that receives it ─ joined and renamed ─ full
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlscale.training.fsdp.export_plan import FullWeight, plan_export
from rlscale.training.fsdp.shards import persistent_buffers
from rlscale.training.modules.lora import Adapter, base_name, find_adapters, merge_adapter, merge_rows, save_adapters
from rlscale.training.optim.muon import local_shard
from rlscale.training.spec import WeightOwners
from rlscale.training.transfer.exchange import PREFETCH_ROUNDS, exchange
from rlscale.training.transfer.hf_folder import write_model_files, write_weight_files
from rlscale.training.transfer.hf_writer import MAX_FILE_BYTES
from rlscale.training.transfer.transfer_plan import TransferPlan

BUCKET_BYTES = 2**25
"""Size of the buckets in which a rank receives weights. A single larger weight may exceed it."""

ONE_WRITER_BYTES = 10**9
"""Size of a model that rank 0 writes alone, into one file."""

Named = tuple[str, Tensor]


class ShardedExporter:
    """Gathers the weights of a sharded model, as often as needed. No rank holds more than a few buckets of it.

    Args:
        model: sharded over all ranks, or not at all.
        dtype: of the weights. Persistent buffers keep theirs.
        to: ranks that get the weights, each about as many bytes. Every rank holds a part of every weight, so `holders`
            are all ranks; `owners` are `MAX_SENDERS` of them (`export_plan.py`).
        bucket_bytes: limit of what a rank receives at once.

    Example:
        exporter = ShardedExporter(model, dtype=torch.bfloat16)
        for name, tensor in exporter.weights():
            ...
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        to: WeightOwners = WeightOwners.first,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._model, self._dtype = model, dtype
        self._shapes = dict(_shapes(model, dtype=dtype))
        self._renamer = _Renamer(model)
        self._is_for_all = to == WeightOwners.every
        self.plan = self._make_plan(to=to, bucket_bytes=bucket_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that send weights to the engines. Each weight is on exactly one of them, or on all ranks."""
        return (0,) if self._is_for_all else self.plan.receivers

    @torch.no_grad()
    def weights(self) -> Iterator[Named]:
        """The weights that this rank gets, by their published names; a collective of all ranks.

        A tied output layer is yielded once, as the embedding. Adapters are merged into their weights.

        Raises:
            WeightSyncError: a shard arrives with another checksum than it was sent with.
        """
        for name, weight in self._full_weights(find_adapters(self._model)):
            yield from self._renamer.published(name, weight)

    @torch.no_grad()
    def base_weights(self) -> Iterator[Named]:
        """Like `weights`, without the adapters."""
        for name, weight in self._full_weights({}):
            yield from self._renamer.published(name, weight)

    def _full_weights(self, adapters: Mapping[str, Adapter]) -> Iterator[Named]:
        """The weights of this rank, those in `adapters` merged with them."""
        if self._is_for_all or dist.get_world_size() == 1:
            yield from _gather_on_all_ranks(self._model, adapters, dtype=self._dtype)
            return
        shards = _Shards(self._model, adapters, dtype=self._dtype)
        start = partial(exchange, self.plan, shards, rank=dist.get_rank(), device=shards.device)
        for arrived in start(prepare=shards.prepare):
            name = self.plan.weights[arrived.weight_index].name
            shape, dtype = self._shapes[name]
            # Shards are padded to the size of the first one; only the last ones are, so all rows come before padding.
            flat = torch.cat(list(arrived.shards))[: prod(shape) * dtype.itemsize]
            yield name, flat.view(dtype).view(shape)

    def _make_plan(self, *, to: WeightOwners, bucket_bytes: int) -> TransferPlan:
        """The transfer plan. It depends on the shapes of the model alone, so every rank computes the same."""
        sharded = {base_name(name) for name, p in self._model.named_parameters() if isinstance(p, DTensor)}
        weights = [
            FullWeight(
                name=name,
                rows=shape[0] if shape else 1,
                row_bytes=prod(shape[1:]) * dtype.itemsize,
                is_sharded=name in sharded,
            )
            for name, (shape, dtype) in self._shapes.items()
        ]
        return plan_export(weights, num_ranks=dist.get_world_size(), to=to, bucket_bytes=bucket_bytes)


class _Shards(Mapping[str, Tensor]):
    """Shards of this rank by plain name, cast when they are requested; see the argument `shards` of `exchange`."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapter], *, dtype: torch.dtype) -> None:
        self._dtype, self._adapters = dtype, adapters
        named = ((base_name(name), parameter.detach()) for name, parameter in model.named_parameters())
        self._parameters = {name: parameter for name, parameter in named if name is not None}
        self._buffers = dict(persistent_buffers(model))
        # Factors A of adapters in full, of the rounds that are in flight.
        self._factors: deque[dict[str, Tensor]] = deque(maxlen=PREFETCH_ROUNDS + 1)

    @property
    def device(self) -> torch.device:
        return local_shard(next(iter(self._parameters.values()))).device

    def prepare(self, names: Sequence[str]) -> None:
        """Gathers the factors that shards of these weights are merged with; a collective of all ranks."""
        adapters = {name: self._adapters[name] for name in names if name in self._adapters}
        self._factors.append({name: _full(adapter.a.detach()) for name, adapter in adapters.items()})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name].contiguous()
        shard, adapter = local_shard(self._parameters[name]), self._adapters.get(name)
        if adapter is None:
            return shard.to(self._dtype).contiguous()
        (full_a,) = (factors[name] for factors in self._factors if name in factors)
        return merge_rows(shard, adapter, full_a=full_a, dtype=self._dtype).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._parameters, *self._buffers))

    def __len__(self) -> int:
        return len(self._parameters) + len(self._buffers)


class _Renamer:
    """Names and layout of published checkpoints, which have e.g. a separate matrix for each expert.

    transformers keeps the experts of a layer in one tensor, for one grouped product instead of many small ones.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._is_same: dict[str, bool] = {}  # by name without numbers

    def published(self, name: str, weight: Tensor) -> Iterator[Named]:
        """The tensors of a weight under their published names."""
        # The conversion takes time for each weight, so those that have the same name everywhere skip it.
        kind = re.sub(r"\d+", "#", name)
        if self._is_same.get(kind):
            yield name, weight
            return
        parts = revert_weight_conversion(self._model, {name: weight})
        self._is_same[kind] = list(parts) == [name]
        for part, tensor in parts.items():
            yield part, tensor.contiguous()


def export_hf(model: PreTrainedModel, folder: Path, *, source: str, dtype: torch.dtype) -> None:
    """Writes a folder that transformers loads, with the adapters alone in its subfolder `adapter`; a collective.

    Every rank writes some of the files, or rank 0 alone those of a small model.

    Args:
        model: sharded.
        folder: created by rank 0 if needed; visible to all ranks.
        source: Hugging Face folder or hub id with the configuration and the tokenizer.
        dtype: of the weights in the files.
    """
    write_model_files(folder, source=source, dtype=dtype)
    exporter = ShardedExporter(model, dtype=dtype)
    max_file_bytes = ONE_WRITER_BYTES
    if exporter.num_bytes > ONE_WRITER_BYTES:
        exporter, max_file_bytes = ShardedExporter(model, dtype=dtype, to=WeightOwners.holders), MAX_FILE_BYTES
    write_weight_files(exporter.weights(), folder, max_file_bytes=max_file_bytes)
    if find_adapters(model):
        save_adapters(model, folder / "adapter", base=source)
    dist.barrier()


def _gather_on_all_ranks(model: nn.Module, adapters: Mapping[str, Adapter], *, dtype: torch.dtype) -> Iterator[Named]:
    """Every weight in full on every rank, one at a time, in the order of the model; a collective of all ranks."""
    for name, parameter in model.named_parameters():
        plain = base_name(name)
        if plain is None:
            continue
        # Cast before the gather: half the bytes in bfloat16.
        adapter = adapters.get(plain)
        weight = parameter.detach().to(dtype) if adapter is None else merge_adapter(parameter, adapter, dtype=dtype)
        yield plain, _full(weight).contiguous()
    yield from persistent_buffers(model)


def _shapes(model: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, tuple[torch.Size, torch.dtype]]]:
    """Shape and dtype of every full weight, by its name in the model without adapters."""
    for name, parameter in model.named_parameters():
        plain = base_name(name)
        if plain is not None:
            yield plain, (parameter.shape, dtype)
    for name, buffer in persistent_buffers(model):
        yield name, (buffer.shape, buffer.dtype)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
