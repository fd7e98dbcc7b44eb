"""The forward pass of a decoder over caches of fixed shape.

Shape legend: B rows (slots), L layers, P prompts, T tokens of a padded prompt, S cached positions, K key-value heads
(of routes: experts of a token), D head dimension, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.engines.embedded.attention import DecodePass, PromptPass
from rlscale.engines.embedded.decoder_layer import DecoderLayer, PackedModule
from rlscale.engines.embedded.decoder_prefix import find_prefix, other_names
from rlscale.engines.embedded.delta_states import DeltaStates
from rlscale.engines.embedded.hidden_norm import HiddenNorm
from rlscale.engines.embedded.kv_cache import KvCache, PromptCache
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.vision_tower import ImageInput, VisionTower, rotate_by_rows
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_config import USE_SGLANG, DecoderConfig, rotary_tables
from rlscale.models.packed_linear import PackedLinear


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
        self.aliases: dict[str, str] = {}
        self.tower: VisionTower | None = None
        family = find_family(config.raw.get("model_type"))
        self._family, vision = family, family.vision
        tower_prefix, prefix = ("", find_prefix(weights)) if vision is None else vision.checkpoint_prefixes
        if tower_prefix:
            weights = {name: w for name, w in weights.items() if not name.startswith(tower_prefix)}
        loader = WeightLoader(weights, dtype=dtype, device=device, precision=precision)
        self._embedding = loader.load(f"{prefix}embed_tokens.weight")
        self._layers = [
            DecoderLayer(loader, f"{prefix}layers.{i}.", config, index=i) for i in range(config.architecture.num_layers)
        ]
        self._norm = HiddenNorm(
            loader.load(f"{prefix}norm.weight"), eps=config.norm_eps, is_zero_centered=config.has_zero_centered_norms
        )
        self._head = PackedLinear(self._load_head(loader, prefix), None)
        left = [name for name in loader.left if not self.is_unused(name)]
        unused = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
        if unused:
            raise ValueError(f"weights must be those of {config.raw.get('model_type')}, got {unused[:3]}; {USE_SGLANG}")
        self.weights: dict[str, Tensor] = loader.weights
        if family.unused_prefixes:
            self.aliases |= other_names(loader.weights, prefix)
        cos, sin = rotary_tables(config, num_positions)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    @property
    def layer_aliases(self) -> dict[str, str]:
        """Names of layers in transformers, which adapters have, where this decoder has those of the checkpoint."""
        found = {other.removesuffix(".weight"): name.removesuffix(".weight") for other, name in self.aliases.items()}
        layers = [layer for projection in self.projections() for layer in projection.layers]
        vision = self._family.vision
        return found | ({} if vision is None else {vision.in_memory(layer): layer for layer in layers})

    def is_unused(self, name: str) -> bool:
        """Whether a tensor belongs to a part that this engine does not compute, e.g. multi-token prediction."""
        mtp, prefixes = self._family.mtp, self._family.unused_prefixes
        is_mtp = mtp is not None and mtp.has(name, num_layers=self.architecture.num_layers)
        return is_mtp or name.startswith(prefixes)

    def new_cache(self, num_rows: int, limit: int, length: int) -> KvCache:
        """An empty cache for `num_rows` sequences, with `length` positions now and at most `limit` later."""
        a, heads = self.architecture, self.architecture.expanded_heads
        shape = (a.num_attention_layers, num_rows * heads, limit, a.expanded_width)
        states = self._new_states(num_rows)
        return KvCache(shape, length, num_heads=heads, dtype=self.dtype, device=self.device, states=states)

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
    ) -> tuple[PromptCache, Tensor]:
        """Computes the cache of padded prompts, and logits after their last tokens [P, V].

        Prompts are padded on the right.
        `adapters` are those of the P * T tokens, and `images` the images of some prompts, by row.
        """
        cache, x = self.encode(ids_PT, lengths_P, images=images, adapters=adapters)
        num, length = ids_PT.shape
        # Row p * T + length - 1 of the flattened prompts is the last token of prompt p.
        ends = torch.arange(num, device=self.device) * length + lengths_P - 1
        return cache, self.logits(x[ends])

    def encode(
        self,
        ids_PT: Tensor,
        lengths_P: Tensor,
        *,
        images: Mapping[int, ImageInput] | None = None,
        adapters: RowAdapters | None = None,
    ) -> tuple[PromptCache, Tensor]:
        """The cache of padded prompts, as `prefill`, and their hidden states [P * T, hidden], for `logits`."""
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
        a = self.architecture
        shape = (a.num_attention_layers, 2, num, a.expanded_heads, length, a.expanded_width)
        cache = PromptCache(torch.empty(shape, dtype=self.dtype, device=self.device), self._new_states(num))
        inputs = PromptPass(num=num, length=length, lengths=lengths_P, cos=cos, sin=sin, adapters=adapters)
        for i, layer in enumerate(self._layers):
            x = layer.encode(x, inputs, cache)
            for rows, deepstack in added:
                if i < len(deepstack):
                    x[rows] += deepstack[i]
        return cache, x

    def decode(
        self,
        ids_B: Tensor,
        positions_B: Tensor,
        cache: KvCache,
        *,
        write: Tensor,
        mask: Tensor,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Computes logits [B, V] after one more token in each row, and writes its keys and values into the cache.

        Args:
            cache: a `new_cache`; only its first B slots are used.
            write: [B * K] indices of the new keys in the flattened rows and positions of the cache.
            mask: added to the scores, [B * K, 1, S]: 0 or -inf.
            adapters: of the B rows.
        """
        x = F.embedding(ids_B, self._embedding)
        cos, sin = self._cos[positions_B].unsqueeze(1), self._sin[positions_B].unsqueeze(1)
        near = self._window_mask(write, mask)
        inputs = DecodePass(cos=cos, sin=sin, write=write, mask=mask, window_mask=near, adapters=adapters)
        for layer in self._layers:
            x = layer.step(x, inputs, cache)
        return self.logits(x)

    def _new_states(self, num_rows: int) -> DeltaStates | None:
        a = self.architecture
        if a.delta is None:
            return None
        return DeltaStates.zeros(a.delta, len(a.linear_layers), num_rows, dtype=self.dtype, device=self.device)

    def _window_mask(self, write: Tensor, mask: Tensor) -> Tensor:
        """`mask` with positions before the sliding window of each row hidden, for layers that have one."""
        if not self.config.window_layers:
            return mask
        length = mask.shape[-1]
        # A row writes the position of its newest token, and the window ends there.
        first = write.remainder(length) - self.architecture.window + 1
        hidden = torch.arange(length, device=mask.device) < first[:, None]
        return mask.masked_fill(hidden.unsqueeze(1), -torch.inf)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, hidden]."""
        return self._head(self._norm(x))

    def expert_ids(self) -> Tensor:
        """Experts of each token of the last pass, 0 in layers without experts: [N, L, K] int16, on the CPU.

        N is the number of rows of `decode`, or of positions P * T of `prefill`.
        """
        layers = [layer.expert_ids for layer in self._layers]
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
        """The linear layers that may have adapters."""
        for layer in self._layers:
            yield from layer.projections()

    def _packed_modules(self) -> Iterator[PackedModule]:
        for layer in self._layers:
            yield from layer.packed_modules()
        yield self._head

    def _load_head(self, loader: WeightLoader, prefix: str) -> Tensor:
        if self.architecture.tied or "lm_head.weight" not in loader:
            loader.skip("lm_head.weight")
            self.aliases["lm_head.weight"] = f"{prefix}embed_tokens.weight"
            return self._embedding
        return loader.load("lm_head.weight")
