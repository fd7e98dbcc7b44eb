"""The vision tower of a model with images: the shapes of its weights, by their names in transformers.

Published towers are data here: a plan of a public model needs no download.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rlscale.architectures.hf_config import TINY_TOWER, TINY_VISION, read_config_json

PREFIX = "model.visual."
COLOURS = 3
NamedShape = tuple[str, tuple[int, ...]]

_QWEN2_5_VL = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
_QWEN3_VL = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (5, 11, 17),
}
PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen2.5-VL-3B-Instruct": {**_QWEN2_5_VL, "model_type": "qwen2_5_vl", "out_hidden_size": 2048},
        "Qwen/Qwen2.5-VL-7B-Instruct": {**_QWEN2_5_VL, "model_type": "qwen2_5_vl", "out_hidden_size": 3584},
        "Qwen/Qwen3-VL-2B-Instruct": {**_QWEN3_VL, "model_type": "qwen3_vl", "out_hidden_size": 2048},
        "Qwen/Qwen3-VL-4B-Instruct": {**_QWEN3_VL, "model_type": "qwen3_vl", "out_hidden_size": 2560},
    }
)
"""Hub id -> `vision_config` of its `config.json`, with the family's `model_type`."""


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Sizes of a vision tower and of the projector behind it.

    Example:
        tower = TowerShape.from_config("qwen3_vl", config_json["vision_config"])
        tower.parameters
    """

    depth: int  # blocks
    hidden_size: int
    intermediate_size: int
    patch_values: int  # of one patch: colours x frames x rows x columns
    merge_size: int  # patches of a side that become one token
    out_size: int  # width of the decoder
    is_gated: bool  # MLP with a gate, and norms without bias: Qwen2.5-VL
    num_positions: int = 0  # learned positions; 0: none
    num_deepstack: int = 0  # further projectors

    @classmethod
    def from_config(cls, model_type: str, vision: Mapping[str, Any]) -> TowerShape:
        """The tower of a `vision_config`, whose missing fields have the values of every published model."""
        patch, frames = int(vision["patch_size"]), int(vision.get("temporal_patch_size", 2))
        return cls(
            depth=int(vision["depth"]),
            hidden_size=int(vision["hidden_size"]),
            intermediate_size=int(vision["intermediate_size"]),
            patch_values=COLOURS * frames * patch**2,
            merge_size=int(vision.get("spatial_merge_size", 2)),
            out_size=int(vision["out_hidden_size"]),
            is_gated=model_type == "qwen2_5_vl",
            num_positions=int(vision.get("num_position_embeddings") or 0),
            num_deepstack=len(vision.get("deepstack_visual_indexes") or ()),
        )

    @property
    def merged_width(self) -> int:
        """Width of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    def block_shapes(self, number: int) -> Iterator[NamedShape]:
        """Weights of one block."""
        h, width, at = self.hidden_size, self.intermediate_size, f"{PREFIX}blocks.{number}."
        for norm in ("norm1", "norm2"):
            yield from self._norm(f"{at}{norm}", h)
        yield from _linear(f"{at}attn.qkv", 3 * h, h)
        yield from _linear(f"{at}attn.proj", h, h)
        inner, last = (("gate_proj", "up_proj"), "down_proj") if self.is_gated else (("linear_fc1",), "linear_fc2")
        for name in inner:
            yield from _linear(f"{at}mlp.{name}", width, h)
        yield from _linear(f"{at}mlp.{last}", h, width)

    def other_shapes(self) -> Iterator[NamedShape]:
        """Weights outside of the blocks: the embedding of patches, positions and projectors."""
        h, merged = self.hidden_size, self.merged_width
        yield f"{PREFIX}patch_embed.proj.weight", (h, self.patch_values)
        if self.is_gated:
            yield from self._norm(f"{PREFIX}merger.ln_q", h)
            yield from _linear(f"{PREFIX}merger.mlp.0", merged, merged)
            yield from _linear(f"{PREFIX}merger.mlp.2", self.out_size, merged)
            return
        yield f"{PREFIX}patch_embed.proj.bias", (h,)
        yield f"{PREFIX}pos_embed.weight", (self.num_positions, h)
        # The further projectors normalise the merged patches.
        mergers = [("merger", h), *[(f"deepstack_merger_list.{i}", merged) for i in range(self.num_deepstack)]]
        for name, width in mergers:
            yield from self._norm(f"{PREFIX}{name}.norm", width)
            yield from _linear(f"{PREFIX}{name}.linear_fc1", merged, merged)
            yield from _linear(f"{PREFIX}{name}.linear_fc2", self.out_size, merged)

    def named_shapes(self) -> Iterator[NamedShape]:
        """All weights."""
        yield from self.other_shapes()
        for number in range(self.depth):
            yield from self.block_shapes(number)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return sum(math.prod(shape) for _, shape in self.block_shapes(0))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the tower with its projectors."""
        return self.depth * self.block_parameters + sum(math.prod(shape) for _, shape in self.other_shapes())

    @cached_property
    def projector_parameters(self) -> int:
        """Parameters of the projector, and of those of deepstack."""
        return sum(math.prod(shape) for name, shape in self.other_shapes() if "merger" in name)

    def _norm(self, name: str, width: int) -> Iterator[NamedShape]:
        yield f"{name}.weight", (width,)
        if not self.is_gated:
            yield f"{name}.bias", (width,)


def find_tower(model_type: str, *, build: str | None, hf_checkpoint: str | None, width: int) -> TowerShape | None:
    """The tower of a model with images.

    Args:
        model_type: of the family.
        build: `model.build`.
        hf_checkpoint: `model.hf_checkpoint`, which counts if `build` is None.
        width: of the decoder.

    Returns:
        None: its `config.json` is not on this machine, and it is not a published model that is known.
    """
    if build is not None and build not in TINY_VISION:
        return None  # a rule reports a family that is not that of the tiny model
    if build is not None:
        return TowerShape.from_config(model_type, {**TINY_TOWER, **TINY_VISION[build], "out_hidden_size": width})
    vision = read_config_json(hf_checkpoint).get("vision_config") or PUBLISHED.get(str(hf_checkpoint))
    return None if vision is None else TowerShape.from_config(model_type, vision)


def _linear(name: str, rows: int, columns: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)
