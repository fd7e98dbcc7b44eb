"""The base of adapters on engines that several jobs share: compared, never sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rlscale.algo.checksum import checksum_like
from rlscale.config import WeightPrecision
from rlscale.errors import WeightSyncError
from rlscale.models.quantized_weights import quantize_weights
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import WeightSyncReport
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import MakeEngine
from rlscale.weights.transport import Weights


class SharedBase:
    """A `BaseChannel` that stops no request: engines load the base from the folder that the trainers read, too.

    Every trainer rank calls every method. Each rank hashes the weights that it would send; rank 0 compares.

    Args:
        group: as of `WeightSync`.
        precision: to which linear layers are quantised before they are hashed. None: they are not.
    """

    def __init__(
        self, *, make_engine: MakeEngine, group: SenderGroup, timeout_s: float, precision: WeightPrecision | None = None
    ) -> None:
        self.rpc = EngineRpc(timeout_s=timeout_s)
        self._make_engine, self._group, self._precision = make_engine, group, precision

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """Replaces the engines. Raises EngineError naming the one that does not answer."""
        if self._group.rank == 0:
            self.rpc.close_clients()
            self.rpc.connect([self._make_engine(address) for address in engines])

    def push(
        self, weights: Weights, version: WeightVersion, *, before_resume: Callable[[], None] | None = None
    ) -> WeightSyncReport:
        """Compares the checksums of all weights with those of every engine.

        Args:
            before_resume: called on rank 0 once they are equal.

        Raises:
            WeightSyncError: an engine holds another base; the message names it and a weight.
        """
        started = time.perf_counter()
        if self._group.is_active:
            held = self._group.all_gather_result(self._read_checksums)[0]
            own = self._group.all_gather_result(lambda: self._hash(weights, held))
            self._group.all_gather_result(lambda: self._compare(held, own, before_resume))
        else:
            for _ in weights:  # rank 0 needs the shards of this rank
                pass
        seconds = time.perf_counter() - started
        return WeightSyncReport(version=version, num_buckets=0, num_bytes=0, seconds=seconds)

    def close(self) -> None:
        """Closes the clients of the engines."""
        self.rpc.close_clients()
        self.rpc.close()

    def _read_checksums(self) -> dict[str, Mapping[str, str]]:
        """The checksums of each engine, on rank 0."""
        if self._group.rank != 0:
            return {}
        answers = self.rpc.call_all(lambda engine: engine.checksums())
        return {
            engine.address.name: ranks[0].checksums for engine, ranks in zip(self.rpc.engines, answers, strict=True)
        }

    def _hash(self, weights: Weights, held: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The checksums of the weights of this rank, of the kind that the engines use."""
        kind = next((value for checksums in held.values() for value in checksums.values()), "xxh3")
        sent = weights if self._precision is None else quantize_weights(weights, self._precision)
        return {name: checksum_like(tensor, kind) for name, tensor in sent}

    def _compare(
        self,
        held: Mapping[str, Mapping[str, str]],
        own: Sequence[Mapping[str, str]],
        before_resume: Callable[[], None] | None,
    ) -> None:
        if self._group.rank != 0:
            return
        expected = {name: value for part in own for name, value in part.items()}
        for engine, checksums in held.items():
            # Of tied weights an engine has one, which the trainers name as the engine does.
            wrong = [name for name, value in checksums.items() if expected.get(name) != value]
            if wrong:
                share = f"{len(wrong)} of {len(checksums)} weights differ"
                raise WeightSyncError(
                    f"{engine} must hold the base of this job, got another {wrong[0]} ({share}); "
                    "set train.lora.shared_base=false"
                )
        if before_resume is not None:
            before_resume()
