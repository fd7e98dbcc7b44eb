"""Weights over gloo: selects the fastest format that all engines read."""

from rlscale.types import WeightVersion
from rlscale.weights.engine_groups import GroupOptions
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.transport import SendReport, Transport, Weights
from rlscale.weights.transports.gloo_blocks import LOAD_FORMAT as BLOCKS
from rlscale.weights.transports.gloo_blocks import BlockTransport
from rlscale.weights.transports.gloo_packed import PackedTransport


class GlooTransport(Transport):
    """Sends tensors in place if every engine reads `tensor_blocks`, else packed buckets, which SGLang reads too."""

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        self._selected: PackedTransport | BlockTransport = PackedTransport(options)

    def open(self, rpc: EngineRpc) -> None:
        """See Transport. The infos of the engines decide."""
        _, others = rpc.split_by_format(BLOCKS)
        self._selected = PackedTransport(self._options) if others else BlockTransport(self._options)
        self._selected.open(rpc)

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        return self._selected.send(weights, version)

    def close(self) -> None:
        """See Transport."""
        self._selected.close()

    def abort(self) -> None:
        """See Transport."""
        self._selected.abort()
