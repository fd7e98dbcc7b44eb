"""The adapters of a running engine: loaded by name and version, verified, and pinned by requests."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from rlscale.engines.embedded.row_adapters import LoraAdapter, LoraFactors, Projection
from rlscale.engines.server.generate_request import BadRequest, Refused
from rlscale.errors import WeightSyncError
from rlscale.weight_types import POLICY_ADAPTER, AdapterUpdate

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = ("use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Keys of peft's config that change the formula; each must be absent, false or empty."""


class AdapterStore:
    """Loads adapters and finds that of a request.

    A name has one current version and a few earlier ones, which requests may name as `<name>@<version>`. A request
    without a name gets the current version of `POLICY_ADAPTER`, or the base where there is none.

    Args:
        projections: of the model, in any order.
        checksum: of a tensor; None: what is sent is not compared.
        max_versions: over all names. The base is then shared by several senders, and requests must name an adapter.
            None: no limit.
        aliases: other names of layers.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        *,
        dtype: torch.dtype,
        device: torch.device,
        checksum: Callable[[Tensor], str] | None,
        max_versions: int | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._projections, self._max_versions, self._aliases = projections, max_versions, dict(aliases or {})
        self._dtype, self._device, self._checksum = dtype, device, checksum
        self._versions: dict[str, dict[str, LoraAdapter]] = {}  # by name, then by version, the newest last

    def load(self, update: AdapterUpdate) -> None:
        """Makes `update` the current version of its name; requests that run keep theirs.

        Raises:
            BadRequest: the adapter does not fit this model.
            Refused: the versions of other names are already as many as fit.
            WeightSyncError: a tensor has another checksum than it was sent with; the message names it.
        """
        self._require_capacity(update)
        tensors = _read(update)
        self._verify(tensors, update.checksums)
        rank, scale = _rank_and_scale(update.config)
        factors = self._factors(_pairs(tensors), rank=rank)
        kept = self._versions.setdefault(update.name, {})
        kept.pop(update.version, None)
        kept[update.version] = LoraAdapter(
            name=update.name,
            version=update.version,
            scale=scale,
            factors=factors,
            checksums=dict(update.checksums),
            is_finite=all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()),
        )
        for version in list(kept)[: -update.num_kept]:
            del kept[version]

    def unload(self, name: str) -> None:
        """Forgets all versions of a name; requests that run keep theirs."""
        if self._versions.pop(name, None) is None:
            raise BadRequest("lora_name", f"be among {sorted(self._versions)}", name)

    def clear(self) -> None:
        """Forgets all adapters: a full update contains the policy's."""
        self._versions.clear()

    def find(self, path: str | None) -> LoraAdapter | None:
        """The adapter of a request. Raises BadRequest for a name or version that is not loaded."""
        if path is None and self.is_shared:
            raise BadRequest("lora_path", "name an adapter on this server, whose base several jobs share", path)
        if path is None:
            versions = self._versions.get(POLICY_ADAPTER)
            return None if versions is None else next(reversed(versions.values()))
        name, _, version = path.partition("@")
        versions = self._versions.get(name, {})
        if not versions or (version and version not in versions):
            known = [f"{each}@{number}" for each, numbers in self._versions.items() for number in numbers]
            raise BadRequest("lora_path", f"be a loaded adapter, {', '.join(known) or 'none'}", path)
        return versions[version] if version else next(reversed(versions.values()))

    def loaded(self) -> dict[str, list[str]]:
        """Versions of each adapter, the newest last."""
        return {name: list(versions) for name, versions in self._versions.items()}

    @property
    def is_shared(self) -> bool:
        """Whether several senders share the base: none of them may change it, or stop requests of the others."""
        return self._max_versions is not None

    def _require_capacity(self, update: AdapterUpdate) -> None:
        if self._max_versions is None:
            return
        own = {*self._versions.get(update.name, ()), update.version}
        num_others = sum(len(versions) for name, versions in self._versions.items() if name != update.name)
        if min(len(own), update.num_kept) + num_others > self._max_versions:
            raise Refused(
                f"adapters of all names must have at most {self._max_versions} versions on this server, got "
                f"{num_others} of other names; unload one of them, or start the server with a larger --max-adapters"
            )

    def _verify(self, tensors: Mapping[str, Tensor], sent: Mapping[str, str]) -> None:
        if self._checksum is None:
            return
        for name, tensor in tensors.items():
            got = self._checksum(tensor)
            if sent.get(name) != got:
                raise WeightSyncError(f"{name} must arrive with checksum {sent.get(name)}, got {got}")

    def _factors(self, pairs: Mapping[str, tuple[Tensor, Tensor]], *, rank: int) -> dict[str, LoraFactors]:
        known = {layer for projection in self._projections for layer in projection.layers}
        pairs = {self._aliases.get(layer, layer): pair for layer, pair in pairs.items()}
        unknown = sorted(pairs.keys() - known)
        if unknown:
            raise BadRequest(
                "serialized_named_tensors", "name linear layers of this model that may have adapters", unknown
            )
        fused = {}
        for projection in self._projections:
            parts = {layer: pairs[layer] for layer in projection.layers if layer in pairs}
            if parts:
                fused[projection.name] = self._fuse(projection, parts, rank=rank)
        return fused

    def _fuse(self, projection: Projection, parts: Mapping[str, tuple[Tensor, Tensor]], *, rank: int) -> LoraFactors:
        width = sum(projection.layers.values())
        # Inference tensors have no version, by which packed products see that a weight has changed.
        with torch.inference_mode(False):
            a_RI = torch.zeros(len(parts) * rank, projection.input_width, dtype=self._dtype, device=self._device)
            b_OR = torch.zeros(width, len(parts) * rank, dtype=self._dtype, device=self._device)
        # Part i has the columns [i * rank, (i + 1) * rank) of B, and in them the rows of its layer alone.
        i = 0
        for layer, rows in projection.rows():
            if layer not in parts:
                continue
            a, b = parts[layer]
            columns = slice(i * rank, (i + 1) * rank)
            for part, target in ((a, a_RI[columns]), (b, b_OR[rows, columns])):
                if part.shape != target.shape:
                    rule = f"have shape {list(target.shape)} for {layer} with rank {rank}"
                    raise BadRequest("serialized_named_tensors", rule, list(part.shape))
                target.copy_(part)
            i += 1
        return LoraFactors(a_RI=a_RI, b_OR=b_OR)


def _read(update: AdapterUpdate) -> dict[str, Tensor]:
    try:
        return load(base64.b64decode(update.payload, validate=True))
    except (binascii.Error, ValueError, SafetensorError) as e:
        raise BadRequest("serialized_named_tensors", "be base64 of the safetensors format", str(e)) from e


def _rank_and_scale(config: Mapping[str, Any]) -> tuple[int, float]:
    for key in _UNSUPPORTED:
        if config.get(key):
            raise BadRequest(f"config_dict.{key}", "be unset on this server", config[key])
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise BadRequest("config_dict.r", "be an integer of at least 1", rank)
    # alpha 0 is what exporters write that do not know it: the adapter would have no effect.
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise BadRequest("config_dict.lora_alpha", "be a number above 0", alpha)
    return rank, alpha / rank


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer. Raises BadRequest for other names, and for a layer that lacks one of them."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise BadRequest("serialized_named_tensors", f"have names of the form {_NAME.pattern}", name)
        found.setdefault(match[1], {})[match[2]] = tensor
    lacking = [layer for layer, parts in found.items() if parts.keys() != {"A", "B"}]
    if lacking or not found:
        raise BadRequest("serialized_named_tensors", "contain A and B of each layer", lacking or "no tensors")
    return {layer: (parts["A"], parts["B"]) for layer, parts in found.items()}
