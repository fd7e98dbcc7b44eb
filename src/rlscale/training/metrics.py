"""Metrics of a step: sums over micro-batches, gathered over ranks in one collective."""

from __future__ import annotations

import math
import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.ragged import Sums


class MetricSums:
    """Adds up (sum, count) pairs, shares and maxima; `gather` returns the same metrics on every rank.

    Invariant: all ranks of the group add the same names, in any order.

    Args:
        device: of the sums.
        group: ranks that hold all micro-batches together, each once; None: all ranks.

    Example:
        sums = MetricSums(device)
        sums.add({"kl": (total, count)})
        sums.add_share("loss", share_of_the_loss)
        metrics, shares_by_rank = sums.gather()
    """

    def __init__(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self._sums: dict[str, Tensor] = {}  # [2]: sum and count
        self._shares: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, sums: Sums, *, prefix: str = "") -> None:
        """Adds sums and counts of metrics that are their quotient."""
        for name, (total, count) in sums.items():
            pair = torch.stack((total.detach(), count.detach())).to(self._device, torch.float64)
            key = prefix + name
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def add_share(self, name: str, share: Tensor) -> None:
        """Adds to a metric that is a plain sum over micro-batches and ranks."""
        share = share.detach().to(self._device, torch.float64)
        self._shares[name] = self._shares[name] + share if name in self._shares else share

    def add_max(self, name: str, value: Tensor) -> None:
        """Adds to a metric that is the maximum over micro-batches and ranks; -inf: this one has no value."""
        value = value.detach().to(self._device, torch.float64)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def gather(self, *, keep_empty: bool = False) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Metrics over all ranks, and the share of each rank by name, to find a bad rank; a collective of the group.

        `keep_empty` returns 0 for a metric without a value, so that every step has the same names.

        Raises:
            ValueError: a rank has added other names, as a function of the user may; raised on every rank.
        """
        self._check_names()
        sums, shares, maxima = sorted(self._sums), sorted(self._shares), sorted(self._maxima)
        if not (sums or shares or maxima):
            return {}, {}
        # One row per rank: all sums and counts, then the shares, then the maxima.
        columns = [self._sums[n] for n in sums] + [self._shares[n][None] for n in shares]
        local = torch.cat(columns + [self._maxima[n][None] for n in maxima])
        rows = [torch.empty_like(local) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, local, group=self._group)
        by_rank = torch.stack(rows).cpu()
        totals, tops = by_rank.sum(dim=0).tolist(), by_rank.amax(dim=0).tolist()
        first_share, first_max = 2 * len(sums), 2 * len(sums) + len(shares)
        pairs = {n: totals[2 * i : 2 * i + 2] for i, n in enumerate(sums)}
        # A count need not be a number of tokens: a user's function may pass the sum of its weights.
        metrics = {n: total / count if count else 0.0 for n, (total, count) in pairs.items() if count or keep_empty}
        metrics |= {n: totals[first_share + i] for i, n in enumerate(shares)}
        found = {n: tops[first_max + i] for i, n in enumerate(maxima)}
        metrics |= {n: 0.0 if top == -math.inf else top for n, top in found.items() if top != -math.inf or keep_empty}
        return metrics, {n: by_rank[:, first_share + i].tolist() for i, n in enumerate(shares)}

    def _check_names(self) -> None:
        """Raises ValueError unless all ranks have the same names: `gather` adds up values by position."""
        names = sorted({*self._sums, *self._shares, *self._maxima})
        # A hash of the names is one number to gather; the names themselves follow only where the hashes differ.
        own_hash = torch.tensor([zlib.crc32("\n".join(names).encode())], dtype=torch.int64, device=self._device)
        hashes = [torch.empty_like(own_hash) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(hashes, own_hash, group=self._group)
        if torch.cat(hashes).eq(own_hash).all():
            return
        by_rank: list[list[str]] = [[] for _ in hashes]
        dist.all_gather_object(by_rank, names, group=self._group)
        common = set(by_rank[0]).intersection(*by_rank)
        rank, extra = next((i, sorted(set(found) - common)) for i, found in enumerate(by_rank) if set(found) - common)
        raise ValueError(
            f"every rank must have the same metrics, got {', '.join(extra)} on rank {rank} and not on all; return "
            "every metric in every micro-batch, with a sum and a count of 0 where there is no value"
        )
