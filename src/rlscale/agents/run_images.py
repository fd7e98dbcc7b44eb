"""Images that agents of a run return: opened once, by the image processor of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlscale.agents.content_parts import map_images
from rlscale.images import Image
from rlscale.renderers.message_images import MessageImages, prompt_messages
from rlscale.renderers.renderer import Message
from rlscale.types import Prompt

if TYPE_CHECKING:
    from rlscale.models.image_processor import ImageProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class RunImages:
    """The image processor of a run, and the text of its placeholder."""

    processor: ImageProcessor
    placeholder: str

    def of(self, prompt: Prompt) -> MessageImages:
        """The images of a trajectory, first those of its prompt."""
        return MessageImages(self.processor.layout, self.placeholder, prompt.images)

    async def open(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        """Messages with hashes in place of data URLs, and their images.

        Raises:
            ValueError: an image cannot be decoded.
        """
        # In a thread: decoding an image takes milliseconds, in which the loop would answer no one.
        return await asyncio.to_thread(self._open, messages)

    def _open(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        images: list[Image] = []

        def open_one(url: str) -> str:
            images.append(self.processor.open_uri(url))
            return images[-1].digest

        return map_images(messages, open_one), images


def task_messages(prompt: Prompt) -> tuple[dict[str, Any], ...]:
    """The messages of a row for an environment: images are parts with their path or data URL."""
    if not prompt.images:
        return prompt.conversation
    uris = {image.digest: image.uri for image in prompt.images}
    return tuple(dict(each) for each in map_images(prompt_messages(prompt), uris.__getitem__))
