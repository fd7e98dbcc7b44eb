"""The forward pass of a decoder over caches of fixed shape.

Shape legend: B rows (slots), L layers, P prompts, T tokens of a padded prompt, S cached positions, H query heads,
K key-value heads (of routes: experts of a token), D head dimension, V vocabulary.

Projections that read the same input are one matrix; the Hugging Face tensors are views into it, so that a weight update
writes straight into what is multiplied.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.engines.embedded.expert_mlp import ExpertMlp
from rlscale.engines.embedded.kv_cache import Cache
from rlscale.models.decoder_config import USE_SGLANG, DecoderConfig, rotary_tables
from rlscale.models.decoder_ops import attend_cached, attend_prompts, gated, rms_norm, split_heads
from rlscale.models.packed_linear import PackedLinear


class DenseMlp:
    """The gated MLP of a layer without experts."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(self._gate_up(x)))

    def prepare(self) -> None:
        """See `PackedLinear`."""
        self._gate_up.prepare()
        self._down.prepare()

    def forget(self) -> None:
        """See `PackedLinear`."""
        self._gate_up.forget()
        self._down.forget()


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear  # to (H + 2K) D
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    mlp: DenseMlp | ExpertMlp


class Decoder:
    """A model ready to decode. Not thread-safe: only the decode thread calls it.

    `weights` maps every Hugging Face name to the live tensor (a view); `aliases` are further names of tied tensors;
    `num_positions` is the longest cache that will be used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
    ) -> None:
        self.config, self.architecture, self.dtype, self.device = config, config.architecture, dtype, device
        self.weights: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._source = dict(weights)
        self._embedding = self._take("model.embed_tokens.weight")
        self._layers = [self._layer(f"model.layers.{i}.") for i in range(config.architecture.num_layers)]
        self._norm = self._take("model.norm.weight")
        self._head = PackedLinear(self._take_head(), None)
        left = [name for name in self._source if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ValueError(f"weights must be those of {config.raw.get('model_type')}, got {left[:3]}; {USE_SGLANG}")
        self._source = {}
        cos, sin = rotary_tables(config, num_positions)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def new_cache(self, num_rows: int, limit: int, length: int) -> Cache:
        """An empty cache for `num_rows` sequences, of `length` positions now and up to `limit` later."""
        a = self.architecture
        shape = (a.num_layers, num_rows * a.num_kv_heads, limit, a.head_dim)
        return Cache(shape, length, dtype=self.dtype, device=self.device)

    def prefill(self, ids_PT: Tensor, lengths_P: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of padded prompts [L, 2, P, K, T, D], and the logits after each prompt's last token [P, V].

        Prompts are padded on the right; positions after a prompt's end hold finite values without meaning.
        """
        a = self.architecture
        num, length = ids_PT.shape
        x = F.embedding(ids_PT.reshape(-1), self._embedding)
        cos = self._cos[:length].repeat(num, 1).unsqueeze(1)
        sin = self._sin[:length].repeat(num, 1).unsqueeze(1)
        cache = torch.empty(
            (a.num_layers, 2, num, a.num_kv_heads, length, a.head_dim), dtype=self.dtype, device=self.device
        )
        for i, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            cache[i, 0] = k.view(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2)
            cache[i, 1] = v.reshape(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2)
            queries = q.view(num, length, a.num_heads, a.head_dim).transpose(1, 2)
            mixed = attend_prompts(queries, cache[i, 0], cache[i, 1])
            x = self._mix_and_mlp(layer, x, mixed.transpose(1, 2).reshape(num * length, -1))
        ends = torch.arange(num, device=self.device) * length + lengths_P - 1
        return cache, self._logits(x[ends])

    def decode(self, ids_B: Tensor, positions_B: Tensor, cache: Tensor, *, write: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, V] after one more token a row; its keys and values are written into the cache.

        Args:
            cache: values of a `new_cache`; the first B sequences are used.
            write: where the new keys go, [B * K] indices into the cache's flattened rows and positions.
            mask: added to the scores, [B * K, 1, S]: 0 or -inf.
        """
        a = self.architecture
        num = ids_B.shape[0]
        rows = num * a.num_kv_heads
        x = F.embedding(ids_B, self._embedding)
        cos, sin = self._cos[positions_B].unsqueeze(1), self._sin[positions_B].unsqueeze(1)
        for i, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            keys, values = cache[i, 0], cache[i, 1]
            keys.view(-1, a.head_dim).index_copy_(0, write, k.reshape(rows, a.head_dim))
            values.view(-1, a.head_dim).index_copy_(0, write, v.reshape(rows, a.head_dim))
            mixed = attend_cached(q.reshape(rows, a.group_size, a.head_dim), keys[:rows], values[:rows], mask)
            x = self._mix_and_mlp(layer, x, mixed.view(num, -1))
        return self._logits(x)

    # -- the blocks

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = layer.qkv(rms_norm(x, layer.input_norm, eps=self.config.norm_eps))
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        return split_heads(qkv, self.config, norms=norms, cos=cos, sin=sin)

    def _mix_and_mlp(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + layer.output(mixed)
        return x + layer.mlp(rms_norm(x, layer.mlp_norm, eps=self.config.norm_eps))

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(rms_norm(x, self._norm, eps=self.config.norm_eps))

    def chosen(self) -> Tensor:
        """Experts of each token of the last pass, 0 in layers without experts. [N, L, K] int16, on the CPU

        N are the rows of `decode`, or the places [P * T] of `prefill`.
        """
        layers = [layer.mlp.chosen_NK if isinstance(layer.mlp, ExpertMlp) else None for layer in self._layers]
        like = next(each for each in layers if each is not None)
        return torch.stack([torch.zeros_like(like) if each is None else each for each in layers], dim=1).short().cpu()

    def prepare_copies(self, goes_on: Callable[[], bool]) -> None:
        """Makes what the next step would make of weights that changed, to multiply faster, part by part.

        `goes_on` is asked before each part; after False the rest is left to that step.
        """
        for part in self._multiplied():
            if not goes_on():
                return
            part.prepare()

    def forget_copies(self) -> None:
        """Frees it; it is made anew when it is needed."""
        for part in self._multiplied():
            part.forget()

    def _multiplied(self) -> Iterator[PackedLinear | DenseMlp | ExpertMlp]:
        for layer in self._layers:
            yield from (layer.qkv, layer.output, layer.mlp)
        yield self._head

    # -- taking over the weights

    def _layer(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        qkv = [attention + f"{part}_proj" for part in "qkv"]
        return _Layer(
            input_norm=self._take(prefix + "input_layernorm.weight"),
            qkv=self._product(qkv),
            query_norm=self._take_if(attention + "q_norm.weight"),
            key_norm=self._take_if(attention + "k_norm.weight"),
            output=self._product([attention + "o_proj"]),
            mlp_norm=self._take(prefix + "post_attention_layernorm.weight"),
            mlp=self._mlp(prefix + "mlp."),
        )

    def _mlp(self, prefix: str) -> DenseMlp | ExpertMlp:
        routing = self.config.routing
        # A model may have experts in some layers only.
        if routing is None or f"{prefix}gate.weight" not in self._source:
            gate_up = self._product([f"{prefix}{part}_proj" for part in ("gate", "up")])
            return DenseMlp(gate_up, self._product([f"{prefix}down_proj"]))
        parts = [
            [f"{prefix}experts.{i}.{part}_proj.weight" for part in ("gate", "up", "down")]
            for i in range(routing.num_experts)
        ]
        experts = [(self._take(gate), self._take(up), self._take(down)) for gate, up, down in parts]
        mlp = ExpertMlp(routing, self._take(f"{prefix}gate.weight"), experts)
        self.weights.update({f"{prefix}{name}": view for name, view in mlp.weights.items()})
        return mlp

    def _product(self, names: list[str]) -> PackedLinear:
        """The layers of these names, which read the same input, as one."""
        return PackedLinear(self._fuse([f"{n}.weight" for n in names]), self._fuse_if([f"{n}.bias" for n in names]))

    def _take(self, name: str) -> Tensor:
        if name not in self._source:
            raise ValueError(f"weights must hold {name}; the checkpoint is incomplete or of another architecture")
        # A copy: the tensor is written by weight updates and may not share memory with the caller's.
        self.weights[name] = self._source.pop(name).detach().to(self.device, self.dtype, copy=True).contiguous()
        return self.weights[name]

    def _take_if(self, name: str) -> Tensor | None:
        return self._take(name) if name in self._source else None

    def _take_head(self) -> Tensor:
        if self.architecture.tied or "lm_head.weight" not in self._source:
            self._source.pop("lm_head.weight", None)
            self.aliases["lm_head.weight"] = "model.embed_tokens.weight"
            return self._embedding
        return self._take("lm_head.weight")

    def _fuse(self, names: list[str]) -> Tensor:
        parts = [self._take(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        fused = torch.cat(parts)
        views = torch.split(fused, [part.shape[0] for part in parts])
        self.weights.update(zip(names, views, strict=True))
        return fused

    def _fuse_if(self, names: list[str]) -> Tensor | None:
        return self._fuse(names) if names[0] in self._source else None
