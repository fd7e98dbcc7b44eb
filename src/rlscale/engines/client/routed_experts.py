"""Routes on the wire, as SGLang 0.5.23 sends them: `meta_info.routed_experts` of an answer that has ended.

With `return_routed_experts` in the request it is the base64 of int32 values [tokens - 1, layers, experts per token]:
one row for each input token of prompt and answer, so for all but the last. Layers without experts are counted and have
zeros. A row belongs to the pass that computed the token's keys and values: after a retraction the last such pass, and
for a cached prompt the pass that filled the cache.
"""

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt

from rlscale.expert_routes import RouteIds, RouteShape


def encode_routes(routes: npt.NDArray[Any]) -> str:
    """Encodes routes [tokens - 1, layers, experts per token] as text."""
    return base64.b64encode(np.ascontiguousarray(routes, dtype=np.int32).tobytes()).decode("ascii")


def decode_routes(text: str, shape: RouteShape, *, num_tokens: int) -> RouteIds:
    """Decodes the routes of `num_tokens` tokens: [num_tokens, layers, experts per token].

    Raises ValueError when the text contains something else.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routes must be base64, got {text[:20]!r}...: {error}") from error
    expected = (num_tokens, shape.num_layers, shape.num_chosen)
    if len(raw) != 4 * int(np.prod(expected)):
        raise ValueError(f"routes must be int32 of shape {list(expected)}, got {len(raw)} bytes")
    ids = np.frombuffer(raw, dtype="<i4").reshape(expected)
    if ids.size and (ids.min() < 0 or ids.max() >= shape.num_experts):
        raise ValueError(
            f"routes must be experts from 0 to {shape.num_experts - 1}, got {int(ids.min())} to {int(ids.max())}"
        )
    return ids.astype(shape.dtype)
