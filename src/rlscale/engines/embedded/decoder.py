"""The forward pass of a decoder over caches of fixed shape.

Shape legend: B rows (slots), L layers, P prompts, T tokens of a padded prompt, S cached positions, H query heads,
K key-value heads (of routes: experts of a token), D head dimension, V vocabulary.

Projections that read the same input are one matrix; the Hugging Face tensors are views into it, so a weight update
writes directly into the matrix that is multiplied.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.engines.embedded.expert_mlp import ExpertMlp
from rlscale.engines.embedded.kv_cache import KvCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.vision_tower import ImageInput, VisionTower, rotate_by_rows
from rlscale.models.decoder_config import USE_SGLANG, DecoderConfig, rotary_tables
from rlscale.models.decoder_ops import attend_cached, attend_prompts, gated, rms_norm, split_heads
from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_linear import QuantizedLinear
from rlscale.models.quantized_weights import QuantizedWeight


class DenseMlp:
    """Gated MLP of a layer without experts."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        return self.down(gated(self.gate_up(x, adapters)), adapters)

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self.gate_up.prepare()
        self.down.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self.gate_up.forget()
        self.down.forget()


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Projection  # to (H + 2K) D
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    mlp: DenseMlp | ExpertMlp


class Decoder:
    """A model ready to decode. Not thread-safe: only the decode thread calls it.

    `weights` maps every Hugging Face name to its live tensor (a view); `aliases` maps further names of tied tensors.

    Args:
        num_positions: length of the longest cache.
        precision: of the linear layers, whose live tensors are then quantised. None: `dtype`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        precision: str | None = None,
    ) -> None:
        self.config, self.architecture, self.dtype, self.device = config, config.architecture, dtype, device
        self._precision = precision
        self.weights: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._source = dict(weights)
        self.tower: VisionTower | None = None
        family = find_family(config.raw.get("model_type"))
        self._mtp, vision = family.mtp, family.vision
        tower_prefix, prefix = ("", "model.") if vision is None else vision.checkpoint_prefixes
        if tower_prefix:
            self._source = {name: w for name, w in self._source.items() if not name.startswith(tower_prefix)}
        self._prefix = prefix
        self._embedding = self._load(f"{prefix}embed_tokens.weight")
        self._layers = [self._layer(f"{prefix}layers.{i}.") for i in range(config.architecture.num_layers)]
        self._norm = self._load(f"{prefix}norm.weight")
        self._head = PackedLinear(self._load_head(), None)
        left = [name for name in self._source if not self.is_unused(name)]
        unused = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
        if unused:
            raise ValueError(f"weights must be those of {config.raw.get('model_type')}, got {unused[:3]}; {USE_SGLANG}")
        self._source = {}
        cos, sin = rotary_tables(config, num_positions)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor belongs to layers for multi-token prediction, which this engine does not compute."""
        return self._mtp is not None and self._mtp.has(name, num_layers=self.architecture.num_layers)

    def new_cache(self, num_rows: int, limit: int, length: int) -> KvCache:
        """An empty cache for `num_rows` sequences, with `length` positions now and at most `limit` later."""
        a = self.architecture
        shape = (a.num_layers, num_rows * a.num_kv_heads, limit, a.head_dim)
        return KvCache(shape, length, dtype=self.dtype, device=self.device)

    def add_tower(self, tower: VisionTower) -> None:
        """Adds the vision tower of a model with images; its weights are updated with those of the decoder."""
        self.tower = tower
        self.weights |= tower.weights

    def prefill(
        self,
        ids_PT: Tensor,
        lengths_P: Tensor,
        *,
        images: Mapping[int, ImageInput] | None = None,
        adapters: RowAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes keys and values of padded prompts [L, 2, P, K, T, D], and logits after their last tokens [P, V].

        Prompts are padded on the right; keys and values of the padding are finite but undefined.
        `adapters` are those of the P * T tokens, and `images` the images of some prompts, by row.
        """
        cache, x = self.encode(ids_PT, images=images, adapters=adapters)
        num, length = ids_PT.shape
        # Row p * T + length - 1 of the flattened prompts is the last token of prompt p.
        ends = torch.arange(num, device=self.device) * length + lengths_P - 1
        return cache, self.logits(x[ends])

    def encode(
        self,
        ids_PT: Tensor,
        *,
        images: Mapping[int, ImageInput] | None = None,
        adapters: RowAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of padded prompts, as `prefill`, and their hidden states [P * T, hidden], for `logits`."""
        a = self.architecture
        num, length = ids_PT.shape
        x = F.embedding(ids_PT.reshape(-1), self._embedding)
        cos = self._cos[:length].repeat(num, 1).unsqueeze(1)
        sin = self._sin[:length].repeat(num, 1).unsqueeze(1)
        added: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        for row, given in (images or {}).items():
            assert self.tower is not None, "only models with images get some"
            first, used = row * length, slice(row * length, row * length + given.positions.shape[1])
            cos[used, 0] = rotate_by_rows(self._cos, given.positions, self.tower.rotary_rows)
            sin[used, 0] = rotate_by_rows(self._sin, given.positions, self.tower.rotary_rows)
            x[first + given.rows] = given.features
            added.append((first + given.rows, given.deepstack))
        cache = torch.empty(
            (a.num_layers, 2, num, a.num_kv_heads, length, a.head_dim), dtype=self.dtype, device=self.device
        )
        for i, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, (cos, sin), adapters)
            cache[i, 0] = k.view(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2)
            cache[i, 1] = v.reshape(num, length, a.num_kv_heads, a.head_dim).transpose(1, 2)
            queries = q.view(num, length, a.num_heads, a.head_dim).transpose(1, 2)
            mixed = attend_prompts(queries, cache[i, 0], cache[i, 1])
            x = self._output_and_mlp(layer, x, mixed.transpose(1, 2).reshape(num * length, -1), adapters)
            for rows, deepstack in added:
                if i < len(deepstack):
                    x[rows] += deepstack[i]
        return cache, x

    def decode(
        self,
        ids_B: Tensor,
        positions_B: Tensor,
        cache: Tensor,
        *,
        write: Tensor,
        mask: Tensor,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes logits [B, V] after one more token in each row, and writes its keys and values into the cache.

        Args:
            cache: values of a `new_cache`; only the first B sequences are used.
            write: [B * K] indices of the new keys in the flattened rows and positions of the cache.
            mask: added to the scores, [B * K, 1, S]: 0 or -inf.
            adapters: of the B rows.
        """
        a = self.architecture
        num = ids_B.shape[0]
        rows = num * a.num_kv_heads
        x = F.embedding(ids_B, self._embedding)
        cos, sin = self._cos[positions_B].unsqueeze(1), self._sin[positions_B].unsqueeze(1)
        for i, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, (cos, sin), adapters)
            keys, values = cache[i, 0], cache[i, 1]
            # A row of the cache is one sequence and one KV head: [B * K, S, D], flattened to [B * K * S, D].
            keys.view(-1, a.head_dim).index_copy_(0, write, k.reshape(rows, a.head_dim))
            values.view(-1, a.head_dim).index_copy_(0, write, v.reshape(rows, a.head_dim))
            mixed = attend_cached(q.reshape(rows, a.group_size, a.head_dim), keys[:rows], values[:rows], mask)
            x = self._output_and_mlp(layer, x, mixed.view(num, -1), adapters)
        return self.logits(x)

    # -- the blocks

    def _project(
        self, layer: _Layer, x: Tensor, tables: tuple[Tensor, Tensor], adapters: RowAdapters | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = tables
        qkv = layer.qkv(rms_norm(x, layer.input_norm, eps=self.config.norm_eps), adapters)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        return split_heads(qkv, self.config, norms=norms, cos=cos, sin=sin)

    def _output_and_mlp(self, layer: _Layer, x: Tensor, mixed: Tensor, adapters: RowAdapters | None) -> Tensor:
        x = x + layer.output(mixed, adapters)
        inner = rms_norm(x, layer.mlp_norm, eps=self.config.norm_eps)
        # Experts have no adapters: see models/adapter_targets.py.
        return x + (layer.mlp(inner) if isinstance(layer.mlp, ExpertMlp) else layer.mlp(inner, adapters))

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, hidden]."""
        return self._head(rms_norm(x, self._norm, eps=self.config.norm_eps))

    def expert_ids(self) -> Tensor:
        """Experts of each token of the last pass, 0 in layers without experts: [N, L, K] int16, on the CPU.

        N is the number of rows of `decode`, or of positions P * T of `prefill`.
        """
        layers = [layer.mlp.expert_ids_NK if isinstance(layer.mlp, ExpertMlp) else None for layer in self._layers]
        like = next(each for each in layers if each is not None)
        return torch.stack([torch.zeros_like(like) if each is None else each for each in layers], dim=1).short().cpu()

    def pack_weights(self, may_continue: Callable[[], bool]) -> None:
        """Packs changed weights for faster products ahead of the next step, which otherwise does it.

        Args:
            may_continue: called before each module; False leaves the other modules to the next step.
        """
        for module in self._packed_modules():
            if not may_continue():
                return
            module.prepare()

    def free_packed_weights(self) -> None:
        """Frees the packed copies; they are created again when they are needed."""
        for module in self._packed_modules():
            module.forget()

    def return_cached_memory(self) -> None:
        """Returns freed memory of a GPU to the driver: torch keeps it, and the trainer is another process."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def projections(self) -> Iterator[Projection]:
        """The layers that may have adapters."""
        for layer in self._layers:
            yield from (layer.qkv, layer.output)
            if isinstance(layer.mlp, DenseMlp):
                yield from (layer.mlp.gate_up, layer.mlp.down)

    def _packed_modules(self) -> Iterator[Projection | PackedLinear | DenseMlp | ExpertMlp]:
        for layer in self._layers:
            yield from (layer.qkv, layer.output, layer.mlp)
        yield self._head

    # -- weights

    def _layer(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        qkv = [attention + f"{part}_proj" for part in "qkv"]
        return _Layer(
            input_norm=self._load(prefix + "input_layernorm.weight"),
            qkv=self._linear(qkv),
            query_norm=self._load_optional(attention + "q_norm.weight"),
            key_norm=self._load_optional(attention + "k_norm.weight"),
            output=self._linear([attention + "o_proj"]),
            mlp_norm=self._load(prefix + "post_attention_layernorm.weight"),
            mlp=self._mlp(prefix + "mlp."),
        )

    def _mlp(self, prefix: str) -> DenseMlp | ExpertMlp:
        routing = self.config.routing
        # A model may have experts in some layers only.
        if routing is None or f"{prefix}gate.weight" not in self._source:
            gate_up = self._linear([f"{prefix}{part}_proj" for part in ("gate", "up")])
            return DenseMlp(gate_up, self._linear([f"{prefix}down_proj"]))
        parts = [
            [f"{prefix}experts.{i}.{part}_proj.weight" for part in ("gate", "up", "down")]
            for i in range(routing.num_experts)
        ]
        router = self._load(f"{prefix}gate.weight")
        if self._precision is not None:
            quantized = [(self._quantize(gate), self._quantize(up), self._quantize(down)) for gate, up, down in parts]
            return ExpertMlp.from_quantized(routing, router, quantized)
        experts = [(self._load(gate), self._load(up), self._load(down)) for gate, up, down in parts]
        mlp = ExpertMlp.from_dense(routing, router, experts)
        self.weights.update({f"{prefix}{name}": view for name, view in mlp.weights.items()})
        return mlp

    def _linear(self, names: list[str]) -> Projection:
        """Fuses the layers of these names, which read the same input, into one."""
        weights, biases = [f"{n}.weight" for n in names], [f"{n}.bias" for n in names]
        if self._precision is not None:
            parts = [self._quantize(name) for name in weights]
            heights = [part.shape[0] for part in parts]
            return Projection(
                QuantizedLinear(parts, self._fuse_optional(biases)), dict(zip(names, heights, strict=True))
            )
        linear = PackedLinear(self._fuse(weights), self._fuse_optional(biases))
        return Projection(linear, {name: int(self.weights[f"{name}.weight"].shape[0]) for name in names})

    def _quantize(self, name: str) -> QuantizedWeight:
        """Quantises a weight as a weight sync does; its tensors replace it in `weights`."""
        assert self._precision is not None, "called only with a precision"
        quantized = QuantizedWeight(name, self._load(name), self._precision)
        del self.weights[name]
        self.weights.update(quantized.tensors)
        return quantized

    def _load(self, name: str) -> Tensor:
        if name not in self._source:
            raise ValueError(f"weights must contain {name}; the checkpoint is incomplete or of another architecture")
        # A copy: weight updates write into the tensor, which must not share memory with the caller's.
        self.weights[name] = self._source.pop(name).detach().to(self.device, self.dtype, copy=True).contiguous()
        return self.weights[name]

    def _load_optional(self, name: str) -> Tensor | None:
        return self._load(name) if name in self._source else None

    def _load_head(self) -> Tensor:
        if self.architecture.tied or "lm_head.weight" not in self._source:
            self._source.pop("lm_head.weight", None)
            self.aliases["lm_head.weight"] = f"{self._prefix}embed_tokens.weight"
            return self._embedding
        return self._load("lm_head.weight")

    def _fuse(self, names: list[str]) -> Tensor:
        parts = [self._load(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        # Updates write into the views, so the names point into the fused matrix from now on.
        fused = torch.cat(parts)
        views = torch.split(fused, [part.shape[0] for part in parts])
        self.weights.update(zip(names, views, strict=True))
        return fused

    def _fuse_optional(self, names: list[str]) -> Tensor | None:
        return self._fuse(names) if names[0] in self._source else None
