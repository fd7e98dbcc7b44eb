"""Images of a micro-batch: each is computed once, and its features are placed wherever a sample has it.

    pixels    image a │ image b │ blank           samples of one group share image a
    features  a a a a │ b b     │ -               tokens after the merge of patches
    rows      t t a a a a t t a a a a t b b t     packed tokens; each image token copies one feature

Shape legend: T packed tokens, E tokens of the samples end to end, N image tokens among T, P patches, I images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.errors import DataError
from rlscale.images import Image
from rlscale.models.image_positions import image_positions, place_images
from rlscale.models.image_processor import ImageProcessor
from rlscale.types import Float32, Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedImages:
    """Pixels of the images of a micro-batch, and the packed tokens that get their features.

    The last image is blank, and no token has it: with sharded weights every rank must compute the vision tower in
    every micro-batch.
    """

    pixels: Tensor  # [P, values of a patch] float32
    grids: Tensor  # [I, 3]
    rows: Tensor  # [N] packed tokens, ascending
    features: Tensor  # [N] index into the features of all images


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRows:
    """Images of samples end to end. Made by `lay_out_images`."""

    images: tuple[Image, ...]  # different ones
    positions: Int64  # [3, E]
    features: Int64  # [E] feature of each token; -1: text

    def keys(self, tokens_E: Int64) -> Int64:
        """Tokens with image tokens replaced by numbers of their features: equal prefixes have equal pictures. [E]"""
        return np.where(self.features < 0, tokens_E, -2 - self.features)

    def packed(self, processor: ImageProcessor, features_T: Int64, device: torch.device) -> PackedImages:
        """The images for rows with these features, -1 where a row has none."""
        rows = np.flatnonzero(features_T >= 0)
        pixels = [processor.pixels(image) for image in self.images]
        side = processor.layout.merge_size
        blank: Float32 = np.zeros((side * side, pixels[0].shape[1] if pixels else processor.patch_values), np.float32)
        grids = [*(image.grid for image in self.images), (1, side, side)]
        return PackedImages(
            pixels=torch.from_numpy(np.concatenate([*pixels, blank])).to(device),
            grids=torch.tensor(grids, device=device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features_T[rows]).to(device),
        )


def lay_out_images(
    batch: TrainBatch, indices_S: Int64, lengths_S: Int64, tokens_E: Int64, processor: ImageProcessor
) -> ImageRows:
    """Finds the images of samples, which lie end to end.

    Raises:
        DataError: a sample has other placeholders than its images have features.
    """
    layout, known = processor.layout, dict[str, int]()  # digest -> first feature
    images: list[Image] = []
    features, positions = np.full(len(tokens_E), -1, np.int64), np.empty((3, len(tokens_E)), np.int64)
    begin, num_features = 0, 0
    for index, length in zip(indices_S.tolist(), lengths_S.tolist(), strict=True):
        own, ids = _images_of(batch, index, length), tokens_E[begin : begin + length]
        grids = [image.grid for image in own]
        if not own:
            _check_prompt(batch, index, ids, layout.image_token)
        try:
            starts = place_images(layout, ids, grids)
        except ValueError as error:
            raise DataError(f"sample {index} of the batch cannot be trained on: {error}") from error
        positions[:, begin : begin + length] = image_positions(layout, length, starts, grids)
        for image, start in zip(own, starts, strict=True):
            count = layout.num_tokens(image.grid)
            if image.digest not in known:
                known[image.digest] = num_features
                images.append(image)
                num_features += count
            first = begin + start
            features[first : first + count] = known[image.digest] + np.arange(count)
        begin += length
    return ImageRows(images=tuple(images), positions=positions, features=features)


def _check_prompt(batch: TrainBatch, index: int, ids: Int64, image_token: int) -> None:
    """Raises DataError if a sample without images has placeholders in its prompt. In an answer they count as text."""
    number = int(np.count_nonzero(ids[: batch.prompt_lens[index]] == image_token))
    if number:
        fault = f"its prompt has {number} placeholder tokens, and no image"
        raise DataError(f"sample {index} of the batch cannot be trained on: {fault}")


def _images_of(batch: TrainBatch, index: int, length: int) -> Sequence[Image]:
    # The placeholder of an empty micro-batch is one token of sample 0, without its images.
    is_whole = length == int(batch.offsets[index + 1] - batch.offsets[index])
    return batch.images[index] if batch.images and is_whole else ()
