"""Images in a decoder: their placeholder tokens, and the frequencies that rotate by rows and columns.

Shape legend: F frequencies of the rotary embedding (half of the head width).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlscale.images import Grid

__all__ = ["Grid", "VisionFamily", "VisionLayout", "rotary_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFamily:
    """Facts about images that the code of a family fixes."""

    interleaved_rotary: bool
    """Frequencies take their position from the three rows in turn. False: from one row after the other, in blocks."""
    checkpoint_prefixes: tuple[str, str]
    """Beginnings of the names of the vision tower and of the decoder in published checkpoints."""

    def in_memory(self, name: str) -> str:
        """The name that transformers gives to the parameter of a tensor in a published checkpoint."""
        for found, known in zip(self.checkpoint_prefixes, ("model.visual.", "model.language_model."), strict=True):
            if name.startswith(found):
                return known + name.removeprefix(found)
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionLayout:
    """Tokens and grids of the images of one model.

    Example:
        layout = VisionLayout.from_config_json(json.loads(Path("config.json").read_text()))
        ids = layout.expand([5, layout.start_token, layout.image_token, 9], [(1, 4, 4)])  # four placeholders
    """

    image_token: int
    start_token: int
    merge_size: int  # patches of a side that become one token
    patch_size: int
    rotary_sections: tuple[int, int, int]

    @classmethod
    def from_config_json(cls, config: Mapping[str, Any]) -> VisionLayout:
        """The layout of a `config.json` with a `vision_config`."""
        vision, text = config["vision_config"], config.get("text_config") or config
        rotary = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        return cls(
            image_token=int(config["image_token_id"]),
            start_token=int(config["vision_start_token_id"]),
            merge_size=int(vision.get("spatial_merge_size", 2)),
            patch_size=int(vision["patch_size"]),
            rotary_sections=tuple(rotary["mrope_section"]),
        )

    def num_tokens(self, grid: Grid) -> int:
        """Placeholder tokens of an image."""
        frames, rows, columns = grid
        return frames * rows * columns // self.merge_size**2

    def expand(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> tuple[int, ...]:
        """Repeats the k-th placeholder as often as image k has features.

        Raises:
            ValueError: there are more or fewer placeholders than images.
        """
        found = list(token_ids).count(self.image_token)
        if found != len(grids):
            raise ValueError(f"a prompt must have one placeholder for each of its {len(grids)} images, got {found}")
        counts = iter(grids)
        return tuple(
            each
            for token in token_ids
            for each in ([token] * (self.num_tokens(next(counts)) if token == self.image_token else 1))
        )


def rotary_rows(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """The row of positions (0 to 2) from which each frequency takes its angle. [F]"""
    if not interleaved:
        return [row for row, count in enumerate(sections) for _ in range(count)]
    rows = [0] * sum(sections)
    # Frequencies 1, 4, 7, ... belong to rows and 2, 5, 8, ... to columns, as many as the section says.
    for row in (1, 2):
        for frequency in range(row, min(3 * sections[row], len(rows)), 3):
            rows[frequency] = row
    return rows
