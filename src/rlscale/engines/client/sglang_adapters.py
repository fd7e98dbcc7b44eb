"""Adapters of a real SGLang server, where a name has one set of tensors: each version has its own, e.g. `policy@8`.

    load      /load_lora_adapter_from_tensors ──> /update_weight_version
    request   /v1/models ──> the newest version ──> /generate with lora_path=policy@8, which SGLang keeps to the end
    prune     /unload_lora_adapter of versions that no request may have any more; SGLang waits for those that run

SGLang compares the SHA-256 of each tensor, and keys its prefix cache by the adapter.
"""

import asyncio
from urllib.parse import urlsplit

from rlscale.engines.client.http_connection import HttpConnection
from rlscale.errors import EngineError
from rlscale.hosts import is_loopback
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import AdapterUpdate


class SglangAdapters:
    """Calls about the adapters of one SGLang server. Not bound to an event loop until its first call."""

    def __init__(self, address: EngineAddress, connection: HttpConnection) -> None:
        self._address, self._connection = address, connection
        self._running: asyncio.Task[dict[str, list[str]]] | None = None
        self._next: asyncio.Task[dict[str, list[str]]] | None = None

    async def loaded(self) -> dict[str, list[str]]:
        """Versions of each adapter, the newest last."""
        models = await self._connection.call("GET", "/v1/models", may_repeat=True)
        found: dict[str, list[int]] = {}
        for model in models["data"]:
            name, at, version = str(model["id"]).rpartition("@")
            if at and version.isdecimal():
                found.setdefault(name, []).append(int(version))
        return {name: [str(version) for version in sorted(versions)] for name, versions in found.items()}

    async def newest(self) -> WeightVersion:
        """The newest version of the address's adapter, as a call finds it that starts after this one.

        Raises EngineError if none is loaded.
        """
        if self._next is None or self._next.get_loop() is not asyncio.get_running_loop():
            self._next = asyncio.create_task(self._read_next())
        # One call answers all requests that wait; shielded, as a request that is cancelled must not fail the others.
        versions = (await asyncio.shield(self._next)).get(self._address.adapter or "", [])
        if not versions:
            raise self._not_loaded("lora_path", self._address.adapter, "/generate")
        return int(versions[-1])

    async def load(self, update: AdapterUpdate) -> None:
        """Loads a version and makes it the newest. Requests that run keep theirs.

        Raises:
            EngineError: the server would read a pickle of other machines, refused the adapter, or died because a
                tensor arrived with another checksum.
        """
        self._require_private()
        kept = (await self.loaded()).get(update.name, [])
        is_loaded = update.is_repeated and update.version in kept
        for version in kept:
            # Of an attempt that failed after it had made them: the newest one would be used.
            if int(version) > int(update.version) or (version == update.version and not is_loaded):
                await self._unload(update.name, version)
        if not is_loaded:
            body = {
                "lora_name": f"{update.name}@{update.version}",
                "config_dict": {"peft_type": "LORA", **update.config},
                "serialized_named_tensors": [update.sglang_payload] * self._address.num_ranks,
                "expected_checksums": dict(update.sha256),
            }
            await self._connection.call("POST", "/load_lora_adapter_from_tensors", body)
        version_body = {"new_version": update.version, "abort_all_requests": False}
        await self._connection.call("POST", "/update_weight_version", version_body)

    async def prune(self, name: str, *, num_kept: int) -> None:
        """Unloads all but the newest versions."""
        for version in (await self.loaded()).get(name, [])[:-num_kept]:
            await self._unload(name, version)

    async def unload(self, name: str) -> None:
        """Unloads all versions. Raises EngineError with status 400 if there are none."""
        versions = (await self.loaded()).get(name, [])
        if not versions:
            raise self._not_loaded("lora_name", name, "/unload_lora_adapter")
        for version in versions:
            await self._unload(name, version)

    async def _unload(self, name: str, version: str) -> None:
        await self._connection.call("POST", "/unload_lora_adapter", {"lora_name": f"{name}@{version}"})

    async def _read_next(self) -> dict[str, list[str]]:
        before = self._running
        if before is not None and before.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([before])
        # Requests that come from now on need a later answer: a version may be loaded while this call runs.
        self._running, self._next = self._next, None
        return await self.loaded()

    def _not_loaded(self, field: str, name: str | None, path: str) -> EngineError:
        """The error of a request that is not sent, as a server of rlscale would refuse it."""
        reason = f"{field} must be a loaded adapter, got {name}"
        return EngineError(f"{self._connection.endpoint(path)} {reason}", status=400, reason=reason)

    def _require_private(self) -> None:
        host = urlsplit(self._address.url).hostname or ""
        if self._address.api_key is None and not is_loopback(host):
            raise EngineError(
                f"{self._address.name} must listen on loopback or require an API key to get adapters, got {host} "
                "without a key; SGLang reads adapters as pickles, which other machines must not send"
            )


def adapter_path(address: EngineAddress, version: WeightVersion | None) -> str | None:
    """Value of `lora_path` in a request; None: the engine has one policy."""
    return address.adapter if version is None else f"{address.adapter}@{version}"
