"""Rows of the batch that the positions of a forward pass stand for.

Shape legend: T positions of this rank, E rows of the batch that are computed at one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Rows of the batch by position, and positions by row: a prefix that samples share has one position for each row.

    Example:
        column[rows.rows] = found_T[rows.places]     # every row gets the value of its position
        given_T = column[rows.at]                    # at padding the last entry
    """

    at: Int64  # [T] a row that is computed at each position, -1 at padding
    rows: Int64  # [E]
    places: Int64  # [E] position of each of these rows

    @classmethod
    def from_places(cls, rows_E: Int64, places_E: Int64, *, num_places: int) -> TokenRows:
        """Builds the maps from rows and the positions that compute them; all other positions are padding."""
        at = np.full(num_places, -1, dtype=np.int64)
        at[places_E] = rows_E
        return cls(at=at, rows=rows_E, places=places_E)

    @classmethod
    def from_positions(cls, at_T: Int64) -> TokenRows:
        """Builds the maps from the row at each position, -1 at padding; no two positions have the same row."""
        places = np.flatnonzero(at_T >= 0)
        return cls(at=at_T, rows=at_T[places], places=places)
