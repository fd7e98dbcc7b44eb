"""The interface between a weight sync and the transports that carry its bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlscale.protocols import Engine
from rlscale.types import WeightVersion
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.sglang_checksums import Expected

Weights = Iterator[tuple[str, Tensor]]
EngineCall = Callable[[Engine], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """Counts and checksums of the weights that one rank sent."""

    num_buckets: int = 0
    num_bytes: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)  # by tensor, where rank 0 needs them
    files: Mapping[str, str] = field(default_factory=dict)  # likewise: tensor -> name of its file
    sglang_checksums: Expected = field(default_factory=dict)  # expected from SGLang, by its own names


class Transport(ABC):
    """Carries the weights that one rank sends to the engines. `WeightSync` calls it and owns the order of the calls.

    A transport that streams writes into paused engines while it sends. Any other transport sends to a folder while
    the engines decode; the engines are paused only to load it. After an error only `abort`, `drain`, `open` and
    `close` may follow.

    Example (the only sender):
        transport.open(rpc)
        transport.prepare(version)
        report = transport.send(weights, version)
        rpc.call_all(transport.publish(version, [report]))
        transport.prune()
        transport.close()
    """

    streams = True

    @abstractmethod
    def open(self, rpc: EngineRpc) -> None:
        """Links this rank with all engines of `rpc`. Called on rank 0 and on every sender."""

    @abstractmethod
    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """Sends the weights of this rank. Called on every sender."""

    @abstractmethod
    def close(self) -> None:
        """Undoes `open`; does nothing without an open link. May wait, and logs engines that do not answer."""

    def abort(self) -> None:
        """Drops a link that failed, without waiting for an engine."""
        self.close()

    def prepare(self, version: WeightVersion) -> None:
        """Creates what all senders of this version share. Called on rank 0 before any rank sends."""
        return

    def publish(self, version: WeightVersion, reports: Sequence[SendReport]) -> EngineCall:
        """Completes a version after all ranks sent, and returns the call by which an engine applies it. On rank 0."""
        return lambda engine: engine.end_weight_update(version)

    def prune(self) -> None:
        """Deletes what the verified version replaces. Called on rank 0."""
        return

    def drain(self, weights: Weights) -> None:
        """Consumes weights without sending them: other ranks need the shards that this rank holds (a collective)."""
        for _ in weights:
            pass
