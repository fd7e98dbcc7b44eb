"""The renderer of a gateway, and the text of single tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlscale.images import Image
from rlscale.renderers.message_images import MessageImages
from rlscale.renderers.renderer import Message, Renderer, ToolSpec
from rlscale.renderers.run_images import RunImages


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Messages to ids and back.

    Attributes:
        decode: text of ids, special tokens included; None: the tokens of logprobs are named by their ids.
        images: of messages; None: messages are texts.
        max_chars_per_token: characters of the longest token; None: not known, and texts of any length are encoded.
    """

    renderer: Renderer
    decode: Callable[[list[int]], str] | None = None
    images: RunImages | None = None
    max_chars_per_token: int | None = None

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), images: Sequence[Image] = ()
    ) -> list[int]:
        """The ids of a conversation.

        Args:
            images: that the messages name by hash.

        Raises:
            RenderError: the template cannot render the messages.
        """
        if self.images is None:
            return self.renderer.render(messages, tools=tools)
        known = MessageImages(self.images.processor.layout, self.images.placeholder, images)
        found = known.find(messages)
        ids = known.expand(self.renderer.render(known.to_template(messages), tools=tools), found, num_known=0)
        known.check_count(ids, found)
        return ids

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token. A part of a character has the sign for unknown characters."""
        if self.decode is None:
            return tuple(f"token_id:{each}" for each in ids)
        return tuple(self.decode([each]) for each in ids)
