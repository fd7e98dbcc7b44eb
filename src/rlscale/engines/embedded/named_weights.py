"""The tensors of a running engine by name, and their memory."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from rlscale.algo.quantization import FP8
from rlscale.engines.server.generate_request import BadRequest
from rlscale.weight_types import WeightBucket

log = logging.getLogger(__name__)


class NamedWeights:
    """Weights of a decoder. Tied ones have several names and one tensor.

    Args:
        weights: tensor of each name.
        aliases: further names of tied tensors.
        is_unused: whether a tensor that is sent belongs to a part of the model that this engine does not compute.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        *,
        is_unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._weights, self._aliases, self._is_unused = weights, aliases, is_unused
        self._has_warned = False
        self._sizes: dict[int, int] = {}  # bytes of released storages, by index in `_storages`

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, under its own name."""
        yield from self._weights.items()

    def own_names(self, names: Collection[str]) -> set[str]:
        """The names of the tensors that `names` stand for."""
        return {self._aliases.get(name, name) for name in names}

    def missing(self, written: Collection[str]) -> list[str]:
        """Tensors that are not among `written`, given by their own names."""
        return [name for name in self._weights if name not in written]

    def targets(self, layout: WeightBucket) -> list[Tensor]:
        """The tensors to write. Raises BadRequest for an unknown name and for another shape."""
        return [self._target(*entry) for entry in zip(layout.names, layout.dtypes, layout.shapes, strict=True)]

    @property
    def is_released(self) -> bool:
        """Whether the tensors have no memory."""
        return bool(self._sizes)

    def release(self) -> None:
        """Frees the memory of all tensors."""
        for i, storage in enumerate(self._storages()):
            self._sizes[i] = storage.nbytes()
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocates the memory of all tensors again, with undefined contents."""
        for i, storage in enumerate(self._storages()):
            storage.resize_(self._sizes[i])
        self._sizes = {}

    def _storages(self) -> list[torch.UntypedStorage]:
        # Fused projections are several weights in one storage. A freed one has no address: `_cdata` identifies it.
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._weights.values()}
        return list(found.values())

    def _target(self, name: str, dtype: str, shape: list[int]) -> Tensor:
        target = self._weights.get(self._aliases.get(name, name))
        if target is None and self._is_unused(name):
            return self._scratch(name, dtype, shape)
        if target is None:
            raise BadRequest("names", "be weights of this model", name)
        if list(target.shape) != list(shape):
            raise BadRequest("shapes", f"be {list(target.shape)} for {name}", shape)
        sent = getattr(torch, dtype, None)
        if not isinstance(sent, torch.dtype):
            raise BadRequest("dtypes", "be names of torch dtypes", dtype)
        # A cast to or from FP8 would ignore the scales.
        if FP8 in (sent, target.dtype) and sent != target.dtype:
            raise BadRequest("dtypes", f"be {str(target.dtype).removeprefix('torch.')} for {name}", dtype)
        return target

    def _scratch(self, name: str, dtype: str, shape: list[int]) -> Tensor:
        """Memory for a tensor that is not used, so that its checksum is compared all the same."""
        if not self._has_warned:
            log.warning("weights of parts that this engine does not compute are ignored, e.g. %s", name)
            self._has_warned = True
        device = next(iter(self._weights.values())).device
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
