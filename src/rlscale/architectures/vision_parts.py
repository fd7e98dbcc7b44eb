"""Words for the parts of a model with images, in patterns of parameter names."""

from collections.abc import Mapping
from types import MappingProxyType

VISION_PARTS: Mapping[str, str] = MappingProxyType({"vision": "visual[.](?!.*merger)", "projector": "merger"})
"""Word -> pattern of its parameters in transformers; a tower has its projector, `merger`, among its modules."""


def expand_word(pattern: str) -> str:
    """The pattern of a word of `VISION_PARTS`; any other pattern as it is."""
    return VISION_PARTS.get(pattern, pattern)
