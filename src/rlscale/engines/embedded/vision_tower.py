"""The vision tower of the embedded engine, and the features of images that were computed with the current weights.

Shape legend: N tokens of an image, W hidden width, T tokens of a prompt, D head dimension.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlscale.architectures.family import find_family
from rlscale.architectures.vision import VisionLayout, rotary_rows
from rlscale.images import Grid, Image
from rlscale.models.image_positions import image_positions, place_images
from rlscale.models.image_processor import ImageProcessor, load_image_processor

MAX_CACHED_IMAGES = 256

BATCH_PATCHES = 256
"""Patches that the tower computes at once: of small images several, as a call costs more than their arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInput:
    """Features and positions of the images of one prompt."""

    rows: Tensor  # [N] tokens that are images
    features: Tensor  # [N, W] that replace their embeddings
    deepstack: tuple[Tensor, ...]  # [N, W] each, added after the first layers
    positions: Tensor  # [3, T]


class VisionTower:
    """Computes features. Not thread-safe, except for `check`.

    Args:
        config: content of `config.json`.
        weights: of the checkpoint; those of the tower are copied.
        model_path: folder of the image processor.
        dtype, device: of the tower.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        *,
        model_path: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Imported here: models without images start without transformers.
        from transformers import AutoConfig

        family = find_family(config["model_type"]).vision
        assert family is not None, "the caller has a model with images"
        fields = {name: value for name, value in config.items() if name != "model_type"}
        hf_config = AutoConfig.for_model(str(config["model_type"]), **fields)
        self._module = _build_tower(hf_config).to(device, dtype).requires_grad_(False).eval()
        prefix, _ = family.checkpoint_prefixes
        self.weights = {prefix + name: parameter.data for name, parameter in self._module.named_parameters()}
        for name, target in self.weights.items():
            if name not in weights:
                fix = "the checkpoint is incomplete or of another architecture"
                raise ValueError(f"weights must contain {name}; {fix}")
            target.copy_(weights[name])
        self.processor: ImageProcessor = load_image_processor(model_path)
        self.layout: VisionLayout = self.processor.layout
        # Both halves of a head use the same frequencies.
        sections = rotary_rows(self.layout.rotary_sections, interleaved=family.interleaved_rotary)
        self.rotary_rows = torch.tensor(sections * 2, device=device)
        self._cache: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self._state: object = None

    def open(self, uris: Sequence[str], token_ids: Sequence[int]) -> tuple[Image, ...]:
        """The images of a request. May be called from any thread.

        Raises:
            ValueError: one cannot be decoded, or the placeholders of the prompt are not those of its features.
        """
        images = tuple(self.processor.open_uri(uri) for uri in uris)
        place_images(self.layout, np.asarray(token_ids), [image.grid for image in images])
        return images

    def rotary_offset(self, token_ids: Sequence[int], images: Sequence[Image]) -> int:
        """The difference between the position of a later token in rotary tables and in the cache."""
        if not images:
            return 0
        ids, grids = np.asarray(token_ids), [image.grid for image in images]
        positions = image_positions(self.layout, len(ids), place_images(self.layout, ids, grids), grids)
        return int(positions.max()) + 1 - len(ids)

    def prepare(
        self, token_ids: Sequence[int], images: Sequence[Image], features: Mapping[str, tuple[Tensor, ...]]
    ) -> ImageInput:
        """The input of a prompt.

        Args:
            token_ids: of the prompt.
            images: its images.
            features: of `features`, by digest.
        """
        ids, grids = np.asarray(token_ids), [image.grid for image in images]
        starts = place_images(self.layout, ids, grids)
        rows = [
            np.arange(start, start + self.layout.num_tokens(grid)) for start, grid in zip(starts, grids, strict=True)
        ]
        # Main features, then those of each layer with deepstack.
        parts = [torch.cat(list(each)) for each in zip(*[features[image.digest] for image in images], strict=True)]
        device = self.rotary_rows.device
        return ImageInput(
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            features=parts[0],
            deepstack=tuple(parts[1:]),
            positions=torch.from_numpy(image_positions(self.layout, len(ids), starts, grids)).to(device),
        )

    def features(self, images: Iterable[Image], *, state: object, is_fixed: bool) -> dict[str, tuple[Tensor, ...]]:
        """Features of images by digest: those for the first layer, then those of each layer with deepstack.

        Args:
            state: of the weights: features of another state are computed again.
            is_fixed: images of a size are computed in batches of one number, filled or not. The last bits depend on
                this number, and on nothing else in the batch.
        """
        if state != self._state:
            self._cache.clear()
            self._state = state
        found: dict[str, tuple[Tensor, ...]] = {}
        waiting: dict[Grid, dict[str, Image]] = defaultdict(dict)
        for image in images:
            if image.digest in self._cache:
                found[image.digest] = self._cache[image.digest]
            else:
                waiting[image.grid][image.digest] = image
        for grid, alike in waiting.items():
            size = max(1, BATCH_PATCHES // math.prod(grid))
            left = iter(alike.values())
            while part := list(islice(left, size)):
                found |= self._compute(part, num_images=size if is_fixed else len(part))
        return found

    def _compute(self, images: Sequence[Image], *, num_images: int) -> dict[str, tuple[Tensor, ...]]:
        """Features of images of one size, computed with as many empty ones as `num_images` has more."""
        weight, grid = next(iter(self.weights.values())), images[0].grid
        pixels = [torch.from_numpy(self.processor.pixels(image)) for image in images]
        pixels += [torch.zeros_like(pixels[0])] * (num_images - len(images))
        grids = torch.tensor([grid] * num_images, device=weight.device)
        output = self._module(torch.cat(pixels).to(weight.device, weight.dtype), grid_thw=grids, return_dict=True)
        parts = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
        # Copies: a slice would keep the features of the whole batch.
        split = zip(*[part.split(self.layout.num_tokens(grid)) for part in parts], strict=True)
        found = {image.digest: tuple(each.clone() for each in own) for image, own in zip(images, split, strict=False)}
        for digest, own in found.items():
            self._cache[digest] = own
            if len(self._cache) > MAX_CACHED_IMAGES:
                self._cache.popitem(last=False)
        return found


def _build_tower(config: Any) -> nn.Module:
    """The vision tower of a model of transformers, with random weights; AutoModel knows some only in later versions."""
    # Imported here: models without images start without transformers.
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    config.vision_config._attn_implementation = "sdpa"
    tower: nn.Module = type(whole.model.visual)(config.vision_config)
    return tower


def rotate_by_rows(table: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Entries of a rotary table [length, D] where dimension d has the position in row rows[d]: [T, D].

    Args:
        table: cosine or sine of each position.
        positions: [3, T]
        rows: [D]
    """
    return table.gather(0, positions[rows].T)


OpenImages = Callable[[Sequence[str], Sequence[int]], tuple[Image, ...]]
"""Opens the images of a request, see `VisionTower.open`."""
