"""Routes of a mixture-of-experts model: the experts that an engine chose for each token and layer."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

RouteIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Expert ids by token and layer, from 0; the largest value of the type marks an unknown one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """Shape of the routes (expert ids per token and layer) of a mixture-of-experts model."""

    num_layers: int  # all layers of the model; entries of layers without experts have no meaning
    num_chosen: int  # experts per token in a layer (top k)
    num_experts: int  # per layer

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger[Any]]":
        """The smallest type that fits all expert ids and the mark of an unknown one."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_chosen * self.dtype.itemsize


def merge_routes(known: RouteIds | None, new: RouteIds | None, *, num_tokens: int) -> RouteIds:
    """Routes of `num_tokens` tokens: the known ones, else the new ones, else the mark of an unknown one."""
    like = new if new is not None else known
    assert like is not None, "at least one of known and new is given"
    assert new is None or len(new) == num_tokens - 1, f"expected {num_tokens - 1} routes, got {len(new)}"
    unknown = np.iinfo(like.dtype).max
    merged = np.full((num_tokens, *like.shape[1:]), unknown, dtype=like.dtype)
    # The last token has no route yet: the engine computes it only when it generates the next one.
    if new is not None:
        merged[:-1] = new
    if known is not None:
        is_known = (known != unknown).all(axis=(1, 2))
        merged[: len(known)][is_known] = known[is_known]
    return merged
