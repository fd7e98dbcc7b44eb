"""Expected answer of SGLang's `/weights_checker` once the server holds the weights that were sent.

On a CPU the checker returns, for every parameter as a rank keeps it, the first 8 bytes of the SHA-256 of its bytes. The
server fuses q, k, v and gate, up along their first dimension, pads vocabularies with zeros to a multiple of 64, and the
width of an MLP to a multiple of 32 for each rank. So the digest of a fused parameter is that of its parts one after the
other. On a GPU the checker uses another hash.

With tensor parallelism a rank keeps a parameter whole, its share of the rows, or its share of the columns, by a rule of
each layer. Fused parameters are shared by rows. For the others any of the three digests is accepted: the shapes of the
server are fixed, so only one of them can have the size of what a rank holds.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlscale.algo.checksum import bytes_of
from rlscale.errors import WeightSyncError
from rlscale.weight_types import RankChecksums

log = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 64
MLP_MULTIPLE = 32  # of each rank

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
# Beginnings of names in checkpoints of models with images -> those of the server
_PREFIXES = (("model.visual.", "visual."), ("model.language_model.", "model."))
_TOWER_QKV = re.compile(r"(?P<before>visual\..*\.attn\.)qkv(?P<after>\.[^.]+)")
_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")
_MLP_ROWS, _MLP_COLUMNS = ("gate_proj", "up_proj"), re.compile(r".*\.down_proj\.weight")


class Holder(NamedTuple):
    """A parameter on one of so many tensor-parallel ranks."""

    name: str
    rank: int = 0
    size: int = 1


Expected = Mapping[Holder, frozenset[str]]
"""The accepted digests of each parameter on each rank."""


@dataclass(slots=True)
class _FusedDigests:
    """A parameter of which some parts have been added; `waiting` holds parts that were added too early."""

    parts: tuple[str, ...]
    digests: dict[Holder, Any]
    num_done: int = 0
    waiting: dict[str, Tensor] = field(default_factory=dict)

    def add(self, part: str, tensor: Tensor) -> None:
        # A digest depends on the order, so parts are hashed in the order of `parts`, in whichever order they come.
        self.waiting[part] = tensor
        while self.num_done < len(self.parts) and self.parts[self.num_done] in self.waiting:
            name = self.parts[self.num_done]
            ready = self.waiting.pop(name).cpu()
            for holder in list(self.digests):
                rows = _cut(ready, holder, dim=0, multiple=MLP_MULTIPLE if name in _MLP_ROWS else 1)
                if rows is None:
                    del self.digests[holder]
                else:
                    self.digests[holder].update(bytes_of(rows).data)
            self.num_done += 1


class SglangChecksums:
    """The expected checksums of one sync, by the server's own names. Tensors must be in the server's dtype.

    Args:
        tp_sizes: numbers of tensor-parallel ranks of the servers.
    """

    def __init__(self, tp_sizes: Collection[int] = (1,)) -> None:
        self._places = [(rank, size) for size in sorted(set(tp_sizes)) for rank in range(size)]
        self._digests: dict[Holder, frozenset[str]] = {}
        self._fused: dict[str, _FusedDigests] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one weight that is sent, under its Hugging Face name."""
        for prefix, own_prefix in _PREFIXES:
            if name.startswith(prefix):
                name = own_prefix + name.removeprefix(prefix)
        tower = _TOWER_QKV.fullmatch(name)
        if tower is not None:  # one tensor in the checkpoint; the ranks of a server share the rows of each part
            for part, rows in zip(_FUSED["q_proj"][1], tensor.chunk(3), strict=True):
                self.add(f"{tower['before']}{part}{tower['after']}", rows)
            return
        match = _PART.fullmatch(name)
        if match is not None:
            whole, parts = _FUSED[match["part"]]
            fused = f"{match['before']}{whole}{match['after']}"
            if fused not in self._fused:
                digests = {Holder(fused, *place): hashlib.sha256() for place in self._places}
                self._fused[fused] = _FusedDigests(parts=parts, digests=digests)
            self._fused[fused].add(match["part"], tensor)
            return
        own = tensor.cpu()
        if _VOCABULARY.fullmatch(name):
            own = _pad(own, dim=0, multiple=VOCABULARY_MULTIPLE)
        columns = MLP_MULTIPLE if _MLP_COLUMNS.fullmatch(name) else 1
        complete = [_digest(own)] if columns == 1 else []
        for holder in (Holder(name, *place) for place in self._places):
            shares = [_cut(own, holder, dim=1, multiple=columns)] if columns > 1 or holder.size > 1 else []
            shares += [_cut(own, holder, dim=0)] if columns == 1 and holder.size > 1 else []
            self._digests[holder] = frozenset([*complete, *(_digest(share) for share in shares if share is not None)])

    def update(self, others: Expected) -> None:
        """Adds the expected checksums of the weights that another rank sent."""
        self._digests.update(others)

    def expected(self) -> Expected:
        """Returns the checksums of all parameters that are complete."""
        complete = [fused.digests for fused in self._fused.values() if fused.num_done == len(fused.parts)]
        fused = {holder: frozenset([_format(digest)]) for each in complete for holder, digest in each.items()}
        return {**self._digests, **fused}

    def compare(self, ranks: Sequence[RankChecksums], *, engine: str) -> None:
        """Compares the server's answer with the expected checksums.

        Raises WeightSyncError naming the engine, the rank and the first parameter that differs.
        """
        expected = self.expected()
        unknown: list[str] = []
        for held in ranks:
            name = f"{engine} rank {held.rank}" if held.size > 1 else engine
            unknown += _compare_rank(held, expected, name=name)
        if unknown:
            log.warning("%s: %d parameters could not be compared, e.g. %s", engine, len(unknown), unknown[0])


def _compare_rank(held: RankChecksums, expected: Expected, *, name: str) -> list[str]:
    """Compares the parameters of one rank; returns those without an expected checksum."""
    accepted = {each: expected.get(Holder(each, held.rank, held.size)) for each in held.checksums}
    if not any(accepted.values()):
        raise WeightSyncError(
            f"{name} must have parameters with expected names such as {[holder.name for holder in expected][:3]}, got "
            f"{list(held.checksums)[:3]}; no checksum can be compared"
        )
    for parameter, digests in accepted.items():
        if digests is not None and held.checksums[parameter] not in digests:
            raise WeightSyncError(
                f"{name} must hold {parameter} with checksum {' or '.join(sorted(digests))} after the sync, got "
                f"{held.checksums[parameter]}; its bytes differ from those that were sent"
            )
    return [parameter for parameter, digests in accepted.items() if digests is None]


def _cut(tensor: Tensor, holder: Holder, *, dim: int, multiple: int = 1) -> Tensor | None:
    """The share of a rank along a dimension; None if the tensor cannot be divided.

    Args:
        multiple: above 1: the tensor is padded with zeros to this multiple for each rank.
    """
    if tensor.dim() <= dim:
        return None
    padded = _pad(tensor, dim=dim, multiple=multiple * holder.size) if multiple > 1 else tensor
    if padded.shape[dim] % holder.size:
        return None
    return padded.chunk(holder.size, dim)[holder.rank].contiguous()


def _pad(tensor: Tensor, *, dim: int, multiple: int) -> Tensor:
    """The tensor, with zeros up to the next multiple of a dimension."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = [missing if each == dim else size for each, size in enumerate(tensor.shape)]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _digest(tensor: Tensor) -> str:
    return _format(hashlib.sha256(bytes_of(tensor).data))


def _format(digest: Any) -> str:
    return str(digest.digest()[:8].hex())
