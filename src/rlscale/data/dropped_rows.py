"""Counts and warnings of rows that give no prompt."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

from rlscale.data.length_filter import Limit, all_too_long
from rlscale.data.prompt_reader import DroppedRow
from rlscale.data.rows import no_usable_prompt
from rlscale.errors import DataError, count_noun

NAMED_ROWS = 10
"""Maximum number of rows listed in a warning; of the others it gives the number."""

_logger = logging.getLogger(__name__)


class DroppedRows:
    """Counts the rows that were dropped, by their reason, and warns of them.

    Rows that are dropped at the start are reported at once; of those that are dropped when they are drawn, a warning
    appears whenever their number reaches a power of ten.
    """

    def __init__(self, source: str) -> None:
        """Args:
        source: name of the files, for messages.
        """
        self._source = source
        self.counts: Counter[str] = Counter()

    def at_start(self, dropped: Sequence[DroppedRow], num_rows: int) -> None:
        """Counts the rows that were dropped of `num_rows`, and warns of them.

        Raises:
            DataError: all were dropped.
        """
        self.counts.update(each.reason for each in dropped)
        if len(dropped) == num_rows:
            raise no_usable_rows(self._source, dropped)
        by_limit: dict[Limit, list[DroppedRow]] = defaultdict(list)
        for each in dropped:
            if each.limit is not None:
                by_limit[each.limit].append(each)
        for limit, rows in by_limit.items():
            _logger.warning(
                "%d of %d %s of %s are longer than %s (%d tokens) and were dropped: rows %s",
                len(rows),
                num_rows,
                limit.what,
                self._source,
                limit.name,
                limit.tokens,
                _list_rows(rows),
            )
        bad = [each for each in dropped if each.limit is None]
        if bad:
            reasons = _list_reasons(Counter(each.reason for each in bad))
            _logger.warning(
                "%d of %d rows of %s were skipped with data.on_bad_row=skip: %s; the first one: %s",
                len(bad),
                num_rows,
                self._source,
                reasons,
                bad[0].message,
            )

    def when_drawn(self, dropped: Sequence[DroppedRow]) -> None:
        """Counts rows that were dropped when they were drawn."""
        for each in dropped:
            self.counts[each.reason] += 1
            total = self.counts.total()
            # 1, 10, 100, ...
            if total == 10 ** (len(str(total)) - 1):
                _logger.warning(
                    "%s of %s dropped so far: %s; the last one: %s",
                    count_noun(total, "row"),
                    self._source,
                    _list_reasons(self.counts),
                    _shown(each),
                )


def no_usable_rows(source: str, dropped: Sequence[DroppedRow]) -> DataError:
    """The error that every row of some files was dropped, once or several times."""
    dropped = list({each.number: each for each in dropped}.values())
    limits = {each.limit for each in dropped}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        reason = all_too_long(limit, len(dropped))
    else:
        first = next((each for each in dropped if each.limit is None), dropped[0])
        reason = f"all {len(dropped)} were dropped: {_list_reasons(Counter(each.reason for each in dropped))}"
        reason += f"; the first one: {_shown(first)}"
    return no_usable_prompt(source, reason)


def _shown(row: DroppedRow) -> str:
    return row.message or f"row {row.index + 1}"


def _list_rows(rows: Sequence[DroppedRow]) -> str:
    others = len(rows) - NAMED_ROWS
    listed = ", ".join(str(each.index + 1) for each in rows[:NAMED_ROWS])
    return listed + (f" and {others} more" if others > 0 else "")


def _list_reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counts.most_common())
