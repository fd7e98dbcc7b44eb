"""Adapters of a sharded model, for engines that hold its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.config import LoraConfig
from rlscale.training.fsdp.export import ShardedExporter
from rlscale.training.modules.lora import adapter_tensors, find_adapters
from rlscale.training.offload import Offloader


class FsdpAdapters:
    """See `AdapterExporter`."""

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig,
        *,
        dtype: torch.dtype,
        exporter: ShardedExporter,
        offloader: Offloader,
    ) -> None:
        self._model, self._dtype, self._exporter, self._offloader = model, dtype, exporter, offloader
        targets = sorted({name.removesuffix(".weight").split(".")[-1] for name in find_adapters(model)})
        self.config: Mapping[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See AdapterExporter. In `train.dtype`, as the trainer computes with them."""
        with self._offloader.resident("policy"):
            for name, tensor in adapter_tensors(self._model):
                yield name, tensor.to(self._dtype)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See AdapterExporter."""
        with self._offloader.resident("policy"):
            yield from self._exporter.base_weights()
