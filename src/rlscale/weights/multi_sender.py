"""Channels whose weights several trainer ranks may send, each those that it owns.

    rank 0                      other senders               other ranks         every engine
      pause, begin     ───────────────────────────────────────────────────────>   stops decoding
      ···················· all meet: the engines are ready ····················
      its own weights  ════════════════════════════════════════════════════════>  compares checksums, writes
                                its own weights  ═════════════════════════════>
      parts of weights  <═════> parts of weights  <═══════> parts of weights
      ···················· all meet: everything has arrived ···················
      end, version, read back  ───────────────────────────────────────────────>   goes on
      ···················· all meet: it is proved ·····························

What fails on one rank is known to all at the next meeting, to which a rank that failed comes too: it sends nothing
more, but still gives the others the parts that they need. With rank 0 as the only sender there are no meetings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlscale.types import EngineAddress, WeightVersion
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import EngineChannel, MakeEngine, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """What one rank has sent."""

    num_buckets: int = 0
    num_bytes: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)  # by tensor, where rank 0 has to know
    files: Mapping[str, str] = field(default_factory=dict)  # likewise: tensor -> name of its file
    of_sglang: Mapping[str, str] = field(default_factory=dict)  # what SGLang must answer, by its own names


class ShareChannel(EngineChannel):
    """Sends weights from one rank or from several. See EngineChannel.

    Args:
        team: this rank, and the ranks whose iterators give weights to `push`, each weight on one of them.
    """

    def __init__(self, *, make_engine: MakeEngine, team: SenderGroup, timeout_s: float) -> None:
        super().__init__(make_engine=make_engine, rank=team.rank, timeout_s=timeout_s)
        self._team = team

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        """See EngineChannel. Ranks link up one after the other: engines enter one group at a time."""
        if self._team.is_one:
            super().connect(engines)
            return
        self._connected = False
        try:
            for rank in self._team.linked:
                self._team.meet(lambda rank=rank: self._link(engines) if rank == self._rank else None)  # type: ignore[misc]
        except BaseException:
            self._abandon()
            raise
        self._connected = True

    def _all_push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        if self._team.is_one:
            return super()._all_push(weights, version)
        try:
            self._team.meet(lambda: self._begin(version))
            shares = self._team.meet(lambda: self._send_own(weights, version))
            self._team.meet(lambda: self._end(version, shares) if self._rank == 0 else None)
        except BaseException:
            self._connected = False
            self._abandon()
            raise
        return sum(share.num_buckets for share in shares), sum(share.num_bytes for share in shares)

    def _push(self, weights: Weights, version: WeightVersion) -> tuple[int, int]:
        self._start(version)
        share = self._send(weights, version)
        self._finish(version, [share])
        return share.num_buckets, share.num_bytes

    def _begin(self, version: WeightVersion) -> None:
        self._expect()
        if self._rank == 0:
            self._start(version)

    def _send_own(self, weights: Weights, version: WeightVersion) -> SendReport:
        try:
            if not self._team.is_sender:
                return SendReport()
            return self._witness(self._send(self._with_checksums(weights), version))
        finally:
            self._gather(weights)  # the other ranks may still need parts that this one holds

    def _witness(self, share: SendReport) -> SendReport:
        return share if self._expected is None else replace(share, of_sglang=self._expected.expected())

    def _end(self, version: WeightVersion, shares: Sequence[SendReport]) -> None:
        if self._expected is not None:
            for share in shares:
                self._expected.update(share.of_sglang)
        self._finish(version, shares)

    # -- what a channel adds

    @abstractmethod
    def _start(self, version: WeightVersion) -> None:
        """Makes ready what all senders need; on rank 0 only."""

    @abstractmethod
    def _send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """Sends what the iterator gives; on every sender."""

    @abstractmethod
    def _finish(self, version: WeightVersion, shares: Sequence[SendReport]) -> None:
        """Ends the update, whose shares have all been sent, and verifies it; on rank 0 only."""
