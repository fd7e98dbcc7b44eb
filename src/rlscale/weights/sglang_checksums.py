"""Expected answer of SGLang's `/weights_checker` once the server holds the weights that were sent.

On a CPU the checker returns, for every parameter as the server keeps it, the first 8 bytes of the SHA-256 of its bytes.
The server fuses q, k, v and gate, up along their first dimension and pads vocabularies with zeros to a multiple of 64.
So the digest of a fused parameter is that of its parts one after the other. On a GPU the checker uses another hash.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlscale.algo.checksum import bytes_of
from rlscale.errors import WeightSyncError

log = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 64

# part -> (fused parameter, its parts in the order of their rows)
_FUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    part: (whole, parts)
    for whole, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    )
    for part in parts
}
_PART = re.compile(rf"(?P<before>.*\.)(?P<part>{'|'.join(_FUSED)})(?P<after>\.[^.]+)")
_PADDED = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")


@dataclass(slots=True)
class _FusedDigest:
    """A parameter of which some parts have been added; `waiting` holds parts that were added too early."""

    parts: tuple[str, ...]
    digest: Any = field(default_factory=hashlib.sha256)
    num_done: int = 0
    waiting: dict[str, Tensor] = field(default_factory=dict)

    def add(self, part: str, tensor: Tensor) -> None:
        # A digest depends on the order, so parts are hashed in the order of `parts`, in whichever order they come.
        self.waiting[part] = tensor
        while self.num_done < len(self.parts) and self.parts[self.num_done] in self.waiting:
            part_bytes = bytes_of(self.waiting.pop(self.parts[self.num_done]).cpu())
            self.digest.update(part_bytes.data)
            self.num_done += 1


class SglangChecksums:
    """The expected checksums of one sync, by the server's own names. Tensors must be in the server's dtype."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._fused: dict[str, _FusedDigest] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one weight that is sent, under its Hugging Face name."""
        match = _PART.fullmatch(name)
        if match is not None:
            whole, parts = _FUSED[match["part"]]
            fused = self._fused.setdefault(f"{match['before']}{whole}{match['after']}", _FusedDigest(parts))
            fused.add(match["part"], tensor)
            return
        digest = hashlib.sha256(bytes_of(tensor.cpu()).data)
        if _PADDED.fullmatch(name):
            # The rows of zeros that the server appends up to the next multiple.
            num_padding_rows = -tensor.shape[0] % VOCABULARY_MULTIPLE
            digest.update(bytes(num_padding_rows * tensor[0].nbytes))
        self._digests[name] = _format(digest)

    def update(self, others: Mapping[str, str]) -> None:
        """Adds the expected checksums of the weights that another rank sent."""
        self._digests.update(others)

    def expected(self) -> dict[str, str]:
        """Returns the checksums of all parameters that are complete."""
        whole = {n: _format(f.digest) for n, f in self._fused.items() if f.num_done == len(f.parts)}
        return {**self._digests, **whole}

    def compare(self, held: Mapping[str, str], *, engine: str, num_ranks: int = 1) -> None:
        """Compares the server's answer with the expected checksums.

        Raises WeightSyncError naming the engine and the first parameter that differs.
        """
        if num_ranks > 1:
            log.warning("%s: weights are split over %d ranks, so their checksums are not compared", engine, num_ranks)
            return
        expected = self.expected()
        common = [name for name in held if name in expected]
        if not common:
            raise WeightSyncError(
                f"{engine} must have parameters with expected names such as {list(expected)[:3]}, got "
                f"{list(held)[:3]}; no checksum can be compared"
            )
        for name in common:
            if held[name] != expected[name]:
                raise WeightSyncError(
                    f"{engine} must hold {name} with checksum {expected[name]} after the sync, got {held[name]}; "
                    "its bytes differ from those that were sent"
                )
        unknown = [name for name in held if name not in expected]
        if unknown:
            log.warning("%s: %d parameters could not be compared, e.g. %s", engine, len(unknown), unknown[0])


def _format(digest: Any) -> str:
    return str(digest.digest()[:8].hex())
