"""Metrics of a step, added up over micro-batches and then over ranks in one collective."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.ragged import Sums


class MetricSums:
    """Adds (sum, count) pairs and takes maxima; `gather` then gives every rank the same numbers.

    Invariant: all ranks of the group add the same names, in any order.

    Args:
        device: where sums are kept.
        group: the ranks that have all micro-batches between them, each once; None: all ranks.

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
        """Adds sums and counts; the metric is their quotient."""
        for name, (total, count) in sums.items():
            pair = torch.stack((total.detach(), count.detach())).to(self._device, torch.float64)
            key = prefix + name
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def add_share(self, name: str, share: Tensor) -> None:
        """Adds to a metric that is a plain sum over micro-batches and ranks."""
        share = share.detach().to(self._device, torch.float64)
        self._shares[name] = self._shares[name] + share if name in self._shares else share

    def add_max(self, name: str, value: Tensor) -> None:
        """A metric that is the largest value over micro-batches and ranks."""
        value = value.detach().to(self._device, torch.float64)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def gather(self, *, keep_empty: bool = False) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The metrics over all ranks, and the share of each rank by name (to tell which one is bad); a collective.

        `keep_empty` gives 0 for a metric whose count is 0, so that every step has the same names.

        Raises:
            ValueError: another rank has added other names, which a function of the user may; on every rank alike.
        """
        self._check_names()
        sums, shares, maxima = sorted(self._sums), sorted(self._shares), sorted(self._maxima)
        if not (sums or shares or maxima):
            return {}, {}
        columns = [self._sums[n] for n in sums] + [self._shares[n][None] for n in shares]
        local = torch.cat(columns + [self._maxima[n][None] for n in maxima])
        rows = [torch.empty_like(local) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, local, group=self._group)
        by_rank = torch.stack(rows).cpu()
        totals, tops = by_rank.sum(dim=0).tolist(), by_rank.amax(dim=0).tolist()
        first_share, first_max = 2 * len(sums), 2 * len(sums) + len(shares)
        pairs = {n: totals[2 * i : 2 * i + 2] for i, n in enumerate(sums)}
        metrics = {n: total / max(count, 1.0) for n, (total, count) in pairs.items() if count or keep_empty}
        metrics |= {n: totals[first_share + i] for i, n in enumerate(shares)}
        metrics |= {n: tops[first_max + i] for i, n in enumerate(maxima)}
        return metrics, {n: by_rank[:, first_share + i].tolist() for i, n in enumerate(shares)}

    def _check_names(self) -> None:
        """Every rank has the same names: numbers of different ones would be added up otherwise."""
        names = sorted({*self._sums, *self._shares, *self._maxima})
        mark = torch.tensor([zlib.crc32("\n".join(names).encode())], dtype=torch.int64, device=self._device)
        marks = [torch.empty_like(mark) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(marks, mark, group=self._group)
        if torch.cat(marks).eq(mark).all():
            return
        by_rank: list[list[str]] = [[] for _ in marks]
        dist.all_gather_object(by_rank, names, group=self._group)
        common = set(by_rank[0]).intersection(*by_rank)
        rank, extra = next((i, sorted(set(found) - common)) for i, found in enumerate(by_rank) if set(found) - common)
        raise ValueError(
            f"every rank must have the same metrics, got {', '.join(extra)} on rank {rank} and not on all; give a "
            "metric in every micro-batch, with a sum and a count of 0 where it has nothing"
        )
