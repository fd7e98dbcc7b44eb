"""Images of the messages of one trajectory: parts of their contents, and placeholders among token ids.

    {"type": "image", "image": <hash>} ── template ──> one placeholder ── expand ──> one for each feature

Engine and trainer get these ids and the same encoded images, in the order of their places.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlscale.architectures.vision import VisionLayout
from rlscale.errors import RenderError
from rlscale.images import IMAGE_MARK, IMAGE_TYPE, Image, image_digests, is_image_part, split_marks
from rlscale.renderers.renderer import Message, Renderer
from rlscale.types import Prompt


class SampledPlaceholderError(RenderError):
    """The policy wrote placeholders of images: they would count as images of later messages."""


class MessageImages:
    """The images of one trajectory by hash. Used from one thread at a time.

    Args:
        placeholder: the text of the placeholder token.

    Example:
        images = MessageImages(processor.layout, "<|image_pad|>", prompt.images)
        ids = images.expand(renderer.bridge(ids, messages), images.find(messages), num_known=len(ids))
    """

    def __init__(self, layout: VisionLayout, placeholder: str, images: Iterable[Image] = ()) -> None:
        self.layout, self._placeholder = layout, placeholder
        self._known: dict[str, Image] = {}
        self.add(images)

    def add(self, images: Iterable[Image]) -> None:
        """Makes images known, which later messages name by hash."""
        for image in images:
            self._known.setdefault(image.digest, image)

    def find(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        """The images of messages, in the order of their places. Raises RenderError for an unknown hash."""
        try:
            return tuple(self._known[digest] for digest in image_digests(messages))
        except KeyError as error:
            raise RenderError(f"an image must be known by its hash, got {error}") from error

    def to_template(self, messages: Sequence[Message]) -> list[Message]:
        """Copies whose texts have no placeholder: a tokenizer would make an image of the text of one."""
        return [{**message, "content": self._without_placeholder(message.get("content"))} for message in messages]

    def expand(self, token_ids: Sequence[int], images: Sequence[Image], *, num_known: int) -> list[int]:
        """Repeats the placeholders after the first `num_known` ids as often as the images have features.

        Raises:
            RenderError: the template has another number of placeholders than there are images.
        """
        try:
            new = self.layout.expand(token_ids[num_known:], [image.grid for image in images])
        except ValueError as error:
            raise RenderError(f"the chat template does not show the images of these messages: {error}") from error
        return [*token_ids[:num_known], *new]

    def check_count(self, token_ids: Sequence[int], images: Sequence[Image]) -> None:
        """Compares the placeholders of a request with the features of its images.

        Raises:
            SampledPlaceholderError: there are more.
        """
        found, wanted = token_ids.count(self.layout.image_token), sum(image.num_tokens for image in images)
        assert found >= wanted, f"a request must have the placeholders of its images, got {found} of {wanted}"
        if images and found > wanted:
            raise SampledPlaceholderError(f"its answers have {found - wanted} placeholders of images, which it wrote")

    def _without_placeholder(self, content: Any) -> Any:
        if isinstance(content, str):
            return content.replace(self._placeholder, f"{self._placeholder[0]} {self._placeholder[1:]}")
        if not isinstance(content, Sequence):
            return content
        return [
            {**part, "text": self._without_placeholder(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]


def check_image_role(renderer: Renderer, images: MessageImages, role: str) -> None:
    """Checks that the chat template shows an image in messages of a role.

    Raises:
        RenderError: it has no placeholder for it, or cannot render such a message.
    """
    calls = [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}]
    answer = {"role": "assistant", "content": "", **({"tool_calls": calls} if role == "tool" else {})}
    picture = {"role": role, "tool_call_id": "call_0", "name": "look", "content": [{"type": IMAGE_TYPE}]}
    found = renderer.render([{"role": "user", "content": "Look."}, answer, picture]).count(images.layout.image_token)
    if found != 1:
        raise RenderError(f"the chat template must show an image in a message of the {role}, got {found} placeholders")


def prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The messages of a row, whose marks `<image>` are parts with the hashes of its images."""
    if not prompt.images:
        return prompt.conversation
    digests = iter(image.digest for image in prompt.images)
    return tuple({**each, "content": _with_images(each.get("content"), digests)} for each in prompt.conversation)


def _with_images(content: Any, digests: Iterable[str]) -> Any:
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return content
    left = iter(digests)
    return [{**part, IMAGE_TYPE: next(left)} if is_image_part(part) else part for part in split_marks(content)]
