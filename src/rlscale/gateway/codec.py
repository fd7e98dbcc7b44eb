"""The renderer of a gateway, and the text of single tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlscale.renderers.renderer import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Messages to ids and back.

    Attributes:
        decode: text of ids, special tokens included; None: the tokens of logprobs are named by their ids.
    """

    renderer: Renderer
    decode: Callable[[list[int]], str] | None = None

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token. A part of a character has the sign for unknown characters."""
        if self.decode is None:
            return tuple(f"token_id:{each}" for each in ids)
        return tuple(self.decode([each]) for each in ids)
