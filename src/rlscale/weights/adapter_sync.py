"""Weight sync of adapters: the base is sent once, then each version is one message of A and B to every engine.

    rank 0                                                  every engine
      first: the base, by the weight channel  ════════════>   paused; compares checksums, writes
      adapter, version, checksums             ────────────>   compares checksums; new requests use it
      versions of adapters                    <────────────   must be the one just sent

After the base no engine is paused: requests that run keep the version that they began with. Where several jobs share
the engines (`train.lora.shared_base`) the base is compared instead, and no engine is ever paused. SGLang unloads no
version itself; it is asked to when the engines generate again.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from safetensors.torch import save
from torch import Tensor

from rlscale.algo.checksum import bytes_of, checksum
from rlscale.errors import WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import POLICY_ADAPTER, AdapterUpdate, WeightSyncReport
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.sglang_payload import serialize_bytes
from rlscale.weights.transport import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSource:
    """The base of the adapters, and their configuration in peft's words."""

    base_weights: Callable[[], Weights]  # a collective of all ranks
    config: Mapping[str, Any]
    num_kept: int = 1  # versions that the engines keep


class BaseChannel(Protocol):
    """Gets the engines to hold the base: a `WeightSync` sends it, a `SharedBase` compares it."""

    rpc: EngineRpc

    def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    def push(
        self, weights: Weights, version: WeightVersion, *, before_resume: Callable[[], None] | None = None
    ) -> WeightSyncReport: ...

    def close(self) -> None: ...


class AdapterSync:
    """A `WeightChannel` for adapters. Every trainer rank calls every method; only rank 0 sends the adapters.

    Args:
        base: sends the base, whenever engines are connected: one that was restarted has the weights of its files.
        rank: of this trainer.

    Example:
        sync = AdapterSync(make_channel(...), source=AdapterSource(base_weights=..., config={"r": 8, ...}), rank=0)
        sync.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:30000")])
        sync.push(adapters.weights(), version=1)
        sync.close()
    """

    def __init__(self, base: BaseChannel, *, source: AdapterSource, rank: int) -> None:
        self._base, self._source, self._rank = base, source, rank
        self._needs_base = True
        self._sent: dict[str, str] = {}  # the version that each engine has of this sender, by URL

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """See WeightSync."""
        self._needs_base = True
        self._base.connect(engines)

    def push(self, weights: Weights, version: WeightVersion) -> WeightSyncReport:
        """Sends the adapters as `version`, and reads back what every engine then has.

        Args:
            weights: A and B under peft's names, in full on rank 0.

        Raises:
            WeightSyncError: a tensor arrived changed, or an engine does not hold `version`; the message names it.
            EngineError: an engine failed or did not answer in time; the message names it.
        """
        started = time.perf_counter()
        # Before the base: gathering either is a collective of all ranks.
        tensors = {name: tensor.contiguous().cpu() for name, tensor in weights}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        report = WeightSyncReport(version=version, num_buckets=0, num_bytes=0, seconds=0.0)
        if self._needs_base:
            # Before the engines resume: none of them may answer with the base alone.
            report = self._base.push(
                self._source.base_weights(), version, before_resume=lambda: self._send(tensors, version)
            )
            self._needs_base = False
        elif self._rank == 0:
            self._send(tensors, version)
        if self._rank == 0:
            self._prune()
        return replace(
            report,
            num_buckets=report.num_buckets + 1,
            num_bytes=report.num_bytes + num_bytes,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """See WeightSync."""
        self._base.close()

    def _send(self, tensors: Mapping[str, Tensor], version: WeightVersion) -> None:
        if not tensors:
            raise WeightSyncError(f"adapters of weight version {version} must have tensors, got none")
        rpc, name = self._base.rpc, self._name
        is_sglang = any(engine.address.names_versions for engine in rpc.engines)
        update = AdapterUpdate(
            name=name,
            version=str(version),
            config=self._source.config,
            payload=base64.b64encode(save(dict(tensors))).decode(),
            checksums={name: checksum(tensor) for name, tensor in tensors.items()},
            num_kept=self._source.num_kept,
            sglang_payload=serialize_bytes(tensors) if is_sglang else "",
            sha256={name: _sha256(tensor) for name, tensor in tensors.items()} if is_sglang else {},
        )
        rpc.call_all(lambda engine: engine.load_adapter(self._mark_repeated(update, engine)))
        self._sent = {engine.address.url: update.version for engine in rpc.engines}
        # An engine that accepts an adapter and ignores it would generate with the base, or with an older version.
        infos = rpc.call_all(lambda engine: engine.info())
        for engine, info in zip(rpc.engines, infos, strict=True):
            loaded = list(info.get("adapters", {}).get(name, ()))
            if loaded[-1:] != [update.version] or info["weight_version"] != version:
                raise WeightSyncError(
                    f"{engine.address.name} must hold adapter {name} of version {version} after the sync, "
                    f"got {loaded or 'none'} and weight version {info['weight_version']}; "
                    "it still generates with other weights"
                )

    def _mark_repeated(self, update: AdapterUpdate, engine: Engine) -> AdapterUpdate:
        # After another engine died all get the version again that they have: requests that run keep it in use.
        return replace(update, is_repeated=self._sent.get(engine.address.url) == update.version)

    def _prune(self) -> None:
        """Unloads old versions of SGLang's engines, one later than allowed: few wait for a request that still runs."""
        rpc, name, num_kept = self._base.rpc, self._name, self._source.num_kept + 1
        if any(engine.address.names_versions for engine in rpc.engines):
            rpc.call_all(lambda engine: engine.prune_adapter(name, num_kept=num_kept))

    @property
    def _name(self) -> str:
        """Name of the adapter: engines of several jobs keep the adapters of each under its own."""
        return next((each.address.adapter for each in self._base.rpc.engines if each.address.adapter), POLICY_ADAPTER)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor).data).hexdigest()
