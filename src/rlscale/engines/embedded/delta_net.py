"""Gated delta net of a decoder layer: linear attention with a state of constant size (arXiv:2412.06464).

    hidden ─ in_proj ─┬─ queries, keys, values ─ convolution ─┬─ delta rule ─ norm ─ * ─ out_proj
                      ├─ decays, betas ───────────────────────┘                      │
                      └─ output gate ────────────────────────────────────────────────┘

Shape legend: N rows of a pass (P * T or B), P prompts, T tokens of a padded prompt, B rows (slots), H value heads,
D key width, V value width, K kernel width, C channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.engines.embedded.attention import DecodePass, PromptPass
from rlscale.engines.embedded.hidden_norm import HiddenNorm
from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import DecoderConfig
from rlscale.models.decoder_ops import in_whole_vectors
from rlscale.models.delta_rule import (
    causal_convolution,
    convolve_last,
    gated_delta_rule,
    gated_delta_step,
    log_decays,
)


class DeltaNet:
    """A gated delta net. Implements `Attention`.

    Args:
        loader: of the weights.
        prefix: of their names, e.g. `model.layers.0.linear_attn.`.
        config: of the model.
        index: of the layer among those with linear attention.
    """

    def __init__(self, loader: WeightLoader, prefix: str, config: DecoderConfig, *, index: int) -> None:
        shape = config.architecture.delta
        assert shape is not None, "called only for a model with linear attention"
        self._shape, self._index, self._is_by_head = shape, index, config.architecture.has_delta_by_head
        inputs = ("qkvz", "ba") if self._is_by_head else ("qkv", "z", "b", "a")
        self._input = loader.linear([f"{prefix}in_proj_{part}" for part in inputs])
        self._taps = loader.load(f"{prefix}conv1d.weight")  # [C, 1, K]
        self._log_rate, self._bias = loader.load(f"{prefix}A_log"), loader.load(f"{prefix}dt_bias")
        self._norm = HiddenNorm(loader.load(f"{prefix}norm.weight"), eps=config.norm_eps)
        self._output = loader.linear([f"{prefix}out_proj"])

    def encode(self, x: Tensor, inputs: PromptPass, cache: PromptCache) -> Tensor:
        """See `Attention`."""
        assert cache.states is not None, "a model with linear attention has states"
        num, length = inputs.num, inputs.length
        qkv, gate, beta, decay = self._project(x, inputs.adapters)
        rows = qkv.view(num, length, -1)
        at_T = torch.arange(length, device=x.device)
        convolved = in_whole_vectors(F.silu, causal_convolution(rows, self._taps.squeeze(1), at_T)).to(x.dtype)
        q, k, v = (each.transpose(1, 2) for each in self._heads(convolved))
        # Padding neither decays nor writes, so that the state stays that of the last token.
        is_token = at_T < inputs.lengths[:, None]
        beta, decay = (each.view(num, length, -1) * is_token.unsqueeze(-1) for each in (beta, decay))
        mixed, state = gated_delta_rule(q, k, v, log_decay=decay.transpose(1, 2), beta=beta.transpose(1, 2))
        cache.states.matrices[self._index] = state
        # The inputs before position `length`, with zeros before the first token.
        width = self._taps.shape[-1] - 1
        ends = inputs.lengths[:, None] + torch.arange(width, device=x.device)
        padded = F.pad(rows, (0, 0, width, 0))
        cache.states.windows[self._index] = padded.gather(1, ends.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        return self._finish(mixed.transpose(1, 2).flatten(0, 1), gate, inputs.adapters)

    def step(self, x: Tensor, inputs: DecodePass, cache: KvCache) -> Tensor:
        """See `Attention`."""
        assert cache.states is not None, "a model with linear attention has states"
        qkv, gate, beta, decay = self._project(x, inputs.adapters)
        window = cache.states.windows[self._index, : len(x)]
        latest = torch.cat((window, qkv.unsqueeze(1)), dim=1)
        window.copy_(latest[:, 1:])
        convolved = in_whole_vectors(F.silu, convolve_last(latest, self._taps.squeeze(1))).to(x.dtype)
        q, k, v = self._heads(convolved)
        state = cache.states.matrices[self._index, : len(x)]
        mixed = gated_delta_step(q, k, v, log_decay=decay, beta=beta, state=state)
        return self._finish(mixed, gate, inputs.adapters)

    def projections(self) -> Iterator[Projection]:
        """See `Attention`."""
        yield from (self._input, self._output)

    def _project(self, x: Tensor, adapters: RowAdapters | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [N, C], output gates [N, H V], betas [N, H], log decays [N, H] float32."""
        shape, parts, projected = self._shape, self._shape.parts, self._input(x, adapters)
        if self._is_by_head:
            # Each key head with the values, gates, betas and decays of the value heads that share it.
            both = torch.split(projected, [sum(parts[:4]), sum(parts[4:])], dim=-1)
            qkvz, ba = (each.view(len(x), shape.key_heads, -1) for each in both)
            groups = [part // shape.key_heads for part in parts]
            q, k, v, gate = (each.flatten(1) for each in torch.split(qkvz, groups[:4], dim=-1))
            beta, decay = (each.flatten(1) for each in torch.split(ba, groups[4:], dim=-1))
            qkv = torch.cat((q, k, v), dim=-1)
        else:
            qkv, gate, beta, decay = torch.split(projected, [shape.channels, *parts[3:]], dim=-1)
        decays = in_whole_vectors(log_decays, decay, self._log_rate, self._bias)
        return qkv, gate, in_whole_vectors(torch.sigmoid, beta), decays

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every value head. [..., C] -> [..., H, D], [..., H, D], [..., H, V]"""
        shape = self._shape
        q, k, v = torch.split(convolved, list(shape.parts[:3]), dim=-1)
        q, k = (each.view(*each.shape[:-1], shape.key_heads, -1) for each in (q, k))
        # Neighbouring value heads share a key head.
        q, k = (each.repeat_interleave(shape.value_heads // shape.key_heads, dim=-2) for each in (q, k))
        return q, k, v.view(*v.shape[:-1], shape.value_heads, -1)

    def _finish(self, mixed: Tensor, gate: Tensor, adapters: RowAdapters | None) -> Tensor:
        """The output [N, hidden] of the delta rule [N, H, V]. The gate multiplies in float32, as in transformers."""
        gated = self._norm(mixed.to(gate.dtype)).flatten(1) * in_whole_vectors(F.silu, gate.float())
        return self._output(gated.to(gate.dtype), adapters)
