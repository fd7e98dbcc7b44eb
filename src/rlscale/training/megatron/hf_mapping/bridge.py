"""Conversion of weights by mbridge instead of our own tables (`model.megatron_to_hf_mode=bridge`).

The model is the same. mbridge loads Hugging Face folders into it and gathers full weights from it, one by one on every
rank of a group, without a transfer plan and without checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.errors import ConfigError, Problem
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel
from rlscale.training.spec import WeightOwners

MODE = "model.megatron_to_hf_mode"
_EXPERT = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.weight)")


def load_by_bridge(model: MegatronModel, path: str) -> None:
    """Fills every parameter of this rank from a Hugging Face folder or hub id; a collective.

    Raises:
        ConfigError: as `make_bridge`.
    """
    make_bridge(model).load_weights([_Renamed(chunk) for chunk in model.chunks], path)


class BridgeExporter:
    """Full weights under Hugging Face names, like `Exporter`, on rank 0 or on every rank."""

    senders = (0,)

    def __init__(self, model: MegatronModel, *, to: WeightOwners = WeightOwners.first) -> None:
        self._is_for_all = to == WeightOwners.every
        self._chunks, self._bridge = [_Renamed(chunk) for chunk in model.chunks], make_bridge(model)

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in full; each item is a collective."""
        for name, tensor in self._bridge.export_weights(self._chunks):
            if self._is_for_all or dist.get_rank() == 0:
                yield name, tensor.detach().contiguous()


def make_bridge(model: MegatronModel) -> Any:
    """The mbridge converter of a model.

    Raises:
        ConfigError: mbridge is not installed, or does not know the family.
    """
    try:
        # Imported here: mbridge is an optional extra.
        import mbridge  # noqa: F401  # its import fills the registry
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ModuleNotFoundError as error:
        rule, fix = f"be raw without {error.name}", "pip install 'rlscale[bridge]', or remove it"
        raise ConfigError([Problem(path=MODE, rule=rule, value="bridge", fix=fix)]) from error
    architecture = model.architecture
    kind = _MODEL_REGISTRY.get(find_family(architecture.family).bridge)
    if kind is None:
        rule = f"be raw for a {architecture.family} model, which this version of mbridge does not convert"
        raise ConfigError([Problem(path=MODE, rule=rule, value="bridge", fix="remove it")])
    # With any divisor set, mbridge pads the vocabulary to the size assigned below, and removes the padding on export.
    options = {"dtype": model.config.params_dtype, "make_vocab_size_divisible_by": 1}
    bridge = type(kind.__name__, (kind,), _own_members(kind, model.config))(architecture.hf_config, **options)
    bridge.vocab_size, bridge.padded_vocab_size = architecture.vocab_size, architecture.padded_vocab_size
    return bridge


def _own_members(kind: Any, config: TransformerConfig) -> dict[str, Any]:
    """Attributes of a class for one model, in place of those of mbridge's class for its family."""
    # Imported here, as in `make_bridge`.
    from mbridge.core import Bridge
    from mbridge.models import Qwen2Bridge

    # mbridge changes the mappings of its class for a model with tied weights; a copy keeps the next model correct.
    members = {name: deepcopy(getattr(kind, name)) for name in dir(kind) if name.endswith("_MAPPING")}
    # Some classes lack the layers without experts of a model that has both; their names are the same in all families.
    members["_MLP_MAPPING"] = {**Qwen2Bridge._MLP_MAPPING, **members["_MLP_MAPPING"]}
    # The class for DeepSeek-V3 would dequantise FP8, on CUDA only; quantised folders are refused before.
    members["_get_safetensor_io"] = Bridge._get_safetensor_io
    # mbridge would describe the model with fields that other versions of Megatron-core and transformers have.
    members["_build_config"] = lambda _: config
    return members


class _Renamed:
    """A chunk that names its experts as Megatron-core's grouped experts do, which is what mbridge expects."""

    def __init__(self, chunk: MegatronDecoder) -> None:
        self._chunk, self.decoder = chunk, chunk.decoder

    def state_dict(self) -> dict[str, Tensor]:
        return {_renamed(name): value for name, value in self._chunk.state_dict().items() if value is not None}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._chunk.named_parameters():
            yield _renamed(name), parameter


def _renamed(name: str) -> str:
    return _EXPERT.sub(r"\1\3\2", name)
