"""Images of the messages of a run: opened once, by the image processor of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlscale.images import IMAGE_TYPE, Image, is_image_part, map_images
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

    @classmethod
    def from_model(cls, path: str, tokenizer: Any) -> RunImages:
        """The image processor of a model's folder or hub id.

        Args:
            tokenizer: of transformers.

        Raises:
            ConfigError: the model has none.
        """
        # Imported here: runs without images do not need transformers for this.
        from rlscale.models.image_processor import load_image_processor

        processor = load_image_processor(path)
        return cls(processor=processor, placeholder=str(tokenizer.convert_ids_to_tokens(processor.layout.image_token)))

    def of(self, prompt: Prompt) -> MessageImages:
        """The images of a trajectory, first those of its prompt."""
        return MessageImages(self.processor.layout, self.placeholder, prompt.images)

    def open(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        """Messages with hashes in place of data URLs, and their images.

        Raises:
            ValueError: an image cannot be decoded.
        """
        images: list[Image] = []

        def open_one(url: str) -> str:
            images.append(self.processor.open_uri(url))
            return images[-1].digest

        return map_images(messages, open_one), images

    async def open_in_thread(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        """As `open`. Decoding an image takes milliseconds, in which the event loop would answer no one."""
        return await asyncio.to_thread(self.open, messages)


def task_messages(prompt: Prompt) -> tuple[dict[str, Any], ...]:
    """The messages of a row for an environment: images are parts with their path or data URL."""
    if not prompt.images:
        return prompt.conversation
    uris = {image.digest: image.uri for image in prompt.images}
    return tuple(dict(each) for each in map_images(prompt_messages(prompt), uris.__getitem__))


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a row in the form of Chat Completions: images are parts of the type `image_url`.

    Raises:
        OSError, ValueError: an image cannot be read any more, or has changed.
    """
    urls = {image.digest: image.data_url() for image in prompt.images}
    return [{**each, "content": _chat_content(each.get("content"), urls)} for each in prompt_messages(prompt)]


def _chat_content(content: Any, urls: Mapping[str, str]) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": urls[part[IMAGE_TYPE]]}} if is_image_part(part) else part
        for part in content
    ]
