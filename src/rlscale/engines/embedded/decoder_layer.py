"""A decoder layer: attention and an MLP, each with norms around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from rlscale.engines.embedded.attention import Attention, DecodePass, GroupedAttention, PromptPass
from rlscale.engines.embedded.delta_net import DeltaNet
from rlscale.engines.embedded.dense_mlp import DenseMlp
from rlscale.engines.embedded.expert_mlp import ExpertMlp
from rlscale.engines.embedded.hidden_norm import HiddenNorm
from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.latent_attention import ExpandedLatentAttention
from rlscale.engines.embedded.load_mlp import load_mlp
from rlscale.engines.embedded.output_gated_attention import OutputGatedAttention
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.packed_linear import PackedLinear

Norm = Callable[[Tensor], Tensor]
PackedModule = Projection | PackedLinear | DenseMlp | ExpertMlp
"""A part with packed weights: it has `prepare` and `forget`."""


class DecoderLayer:
    """`x + attention(norm x)`, then `x + mlp(norm x)`. GLM-4 also normalises both summands.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.`.
        config: of the model.
        index: of the layer.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        def load_norm(name: str) -> Norm:
            weight = loader.load(f"{prefix}{name}.weight")
            return HiddenNorm(weight, eps=config.norm_eps, is_zero_centered=config.has_zero_centered_norms)

        self._input_norm = load_norm("input_layernorm")
        self.attention = _load_attention(loader, prefix, config, index=index)
        self._mlp_norm = load_norm("post_attention_layernorm")
        self._mlp = load_mlp(loader, prefix, config, index=index)
        self._post_norms: tuple[Norm, Norm] | None = None
        if config.architecture.has_post_norms:
            self._post_norms = load_norm("post_self_attn_layernorm"), load_norm("post_mlp_layernorm")

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """The hidden states [P * T, hidden] of padded prompts after this layer; fills its part of `cache`."""
        return self._add(x, self.attention.encode(self._input_norm(x), inputs, cache), inputs.adapters)

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """The hidden states [B, hidden] of one more token in each row; writes its part of `cache`."""
        return self._add(x, self.attention.step(self._input_norm(x), inputs, cache), inputs.adapters)

    @property
    def expert_ids(self) -> Tensor | None:
        """Experts of each token of the last pass, in any order [N, K]; None without experts."""
        return self._mlp.expert_ids if isinstance(self._mlp, ExpertMlp) else None

    def projections(self) -> Iterator[Projection]:
        """The linear layers that may have adapters."""
        yield from self.attention.projections()
        yield from self._mlp.projections()

    def packed_modules(self) -> Iterator[PackedModule]:
        """The parts with packed weights."""
        yield from self.attention.projections()
        yield self._mlp

    def _add(self, x: Tensor, mixed: Tensor, adapters: RowAdapters | None) -> Tensor:
        """Adds the output of attention, then that of the MLP."""
        if self._post_norms is None:
            x = x + mixed
            return x + self._mlp(self._mlp_norm(x), adapters)
        attention_norm, mlp_norm = self._post_norms
        x = x + attention_norm(mixed)
        return x + mlp_norm(self._mlp(self._mlp_norm(x), adapters))


def _load_attention(loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> Attention:
    a, attention = config.architecture, f"{prefix}self_attn."
    if index in a.linear_layers:
        return DeltaNet(loader, f"{prefix}linear_attn.", config, index=a.state_index(index))
    if a.delta is not None:
        return OutputGatedAttention(loader, attention, config, index=a.state_index(index))
    if a.is_latent:
        return ExpandedLatentAttention(loader, attention, config, index=index)
    window = a.window if index in config.window_layers else None
    return GroupedAttention(loader, attention, config, index=index, window=window)
