"""A decoder layer: attention and an MLP, each with norms around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from rlscale.engines.embedded.attention import Attention, DecodePass, GroupedAttention, PromptPass
from rlscale.engines.embedded.dense_mlp import DenseMlp
from rlscale.engines.embedded.expert_mlp import ExpertMlp
from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import rms_norm
from rlscale.models.packed_linear import PackedLinear

Norm = Callable[[Tensor], Tensor]
PackedModule = Projection | PackedLinear | DenseMlp | ExpertMlp
"""A part with packed weights: it has `prepare` and `forget`."""


class HiddenNorm:
    """RMS norm over the hidden width, times a weight."""

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, eps=self._eps)


class DecoderLayer:
    """`x + attention(norm x)`, then `x + mlp(norm x)`.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.`.
        config: of the model.
        index: of the layer.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        eps = config.norm_eps
        self._input_norm: Norm = HiddenNorm(loader.load(f"{prefix}input_layernorm.weight"), eps=eps)
        self.attention: Attention = GroupedAttention(loader, f"{prefix}self_attn.", config, index=index)
        self._mlp_norm: Norm = HiddenNorm(loader.load(f"{prefix}post_attention_layernorm.weight"), eps=eps)
        self._mlp = _load_mlp(loader, f"{prefix}mlp.", config)

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """The hidden states [P * T, hidden] of padded prompts after this layer; fills its part of `cache`."""
        return self._add_mlp(x + self.attention.encode(self._input_norm(x), inputs, cache), inputs.adapters)

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """The hidden states [B, hidden] of one more token in each row; writes its part of `cache`."""
        return self._add_mlp(x + self.attention.step(self._input_norm(x), inputs, cache), inputs.adapters)

    @property
    def expert_ids(self) -> Tensor | None:
        """Experts of each token of the last pass, in any order [N, K]; None without experts."""
        return self._mlp.expert_ids_NK if isinstance(self._mlp, ExpertMlp) else None

    def projections(self) -> Iterator[Projection]:
        """The linear layers that may have adapters."""
        yield from self.attention.projections()
        yield from self._mlp.projections()

    def packed_modules(self) -> Iterator[PackedModule]:
        """The parts with packed weights."""
        yield from self.attention.projections()
        yield self._mlp

    def _add_mlp(self, x: Tensor, adapters: RowAdapters | None) -> Tensor:
        return x + self._mlp(self._mlp_norm(x), adapters)


def _load_mlp(loader: WeightLoader, prefix: str, config: DecoderConfig) -> DenseMlp | ExpertMlp:
    # A model may have experts in some layers only.
    if config.routing is None or f"{prefix}gate.weight" not in loader:
        return DenseMlp.from_weights(loader, prefix)
    return ExpertMlp.from_weights(loader, prefix, config.routing)
